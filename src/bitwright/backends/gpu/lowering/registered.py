"""Importing this module registers the lowerings of all kernel families."""

import importlib
import pkgutil

import bitwright.backends.gpu.kernels as families

importlib.import_module("bitwright.backends.cpu.kernels.movement.lower_views")
for _module in pkgutil.walk_packages(families.__path__, f"{families.__name__}."):
    if _module.name.rpartition(".")[2].startswith("lower_"):
        importlib.import_module(_module.name)
