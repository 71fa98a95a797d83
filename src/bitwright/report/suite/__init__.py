"""The benchmark suite: ops and models at several precisions, and comparison with a baseline."""
