"""The GPU backend: Triton kernels that the compiler writes. `bw.compile(target="cuda")`."""
