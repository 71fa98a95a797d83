"""Kernel generators. Each emits into a module and gives the signature of its slots:

signature = emit_…(module, name, …)          # what shapes the code
table = signature.pack(x=…, rows=…, …)       # what is known when it runs
"""
