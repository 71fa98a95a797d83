"""Movement: pad, roll, tables, sequences of numbers, gathers and scatters. Views are the CPU's."""
