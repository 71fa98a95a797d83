"""The CPU backend: LLVM, written from Python.

From the bottom up, each using only what stands before it:

    emit/           our builder of LLVM text: types, values, control flow, kernels and their slots
    math/           exp, erf, tanh, sin … as vector polynomials with stated errors
    instr.py        dot-product instructions, each with its meaning in numpy
    scalars.py      renders the ops' scalar forms; expression.py: whole elementwise regions
    cache.py        object code kept on disk
    loader.py       object code into executable memory without LLVM
    jit.py          text -> object code -> addresses; compilers.py: by processes of their own
    kernel_store.py kernels by name, from the cache or from a compiler
    runtime.py      the emitted step runner, barrier and worker; native.py: it, loaded;
                    pool.py: threads parked in it
    kernels/        generators of what models are made of
    lowering.py     from graph to schedule, with one file per family of ops in lower/
    build.py        from graph to code: schedule, object code, checks
    stored.py       code as a file that a later process maps
    program.py      code, its memory and its threads, ready to run
"""
