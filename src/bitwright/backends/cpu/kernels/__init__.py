"""Kernel generators. Each emits into a module and returns the signature of its slots:

signature = emit_…(module, name, …)          # compile-time parameters
table = signature.pack(x=…, rows=…, …)       # run-time arguments
"""
