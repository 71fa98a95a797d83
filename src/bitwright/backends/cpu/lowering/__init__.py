"""Lowering of graphs to schedules, and the build of compiled artifacts."""
