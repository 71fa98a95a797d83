"""Movement: pad, roll, tables, sequences of numbers. Views and copies are the CPU's."""
