"""The CPU backend: LLVM, written from Python.

emit/      our builder of LLVM text            instr.py   dot-product instructions and meanings
math/      exp, erf, tanh … as polynomials     scalars.py renders the ops' scalar forms
jit.py     text -> object code -> addresses    cache.py   object code kept on disk
runtime.py the emitted step runner and barrier pool.py    threads parked in native code
kernels/   what models are made of
"""
