"""Code generation: the emitter, vector math, instructions, LLVM."""
