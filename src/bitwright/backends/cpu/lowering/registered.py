"""Importing this module registers the lowerings of all kernel families."""

import importlib
import pkgutil

import bitwright.backends.cpu.kernels as families

for _module in pkgutil.walk_packages(families.__path__, f"{families.__name__}."):
    if _module.name.rpartition(".")[2].startswith("lower_"):
        importlib.import_module(_module.name)
importlib.import_module("bitwright.backends.cpu.lowering.control")
