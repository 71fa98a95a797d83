"""The CPU backend: generates LLVM IR from Python.

codegen/     LLVM IR builder, vector math, dot-product instructions, JIT compiler and loader
lowering/    graph to schedule: the shared context, fused regions, the compiled artifact
kernels/     one folder per kernel family: selection (`lower_*`) and emission
cache/       object code and compiled models on disk
runtime/     programs, memory plans, step tables, worker threads
profile/     step timing and measured peaks
passes.py    the passes of this backend
backend.py   `build` and `load`
"""
