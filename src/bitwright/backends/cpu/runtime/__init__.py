"""Running a compiled model: memory, threads, steps."""
