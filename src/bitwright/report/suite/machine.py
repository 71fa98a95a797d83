"""The description of a machine that results are stored with."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import __version__ as version
from bitwright.machine.facts import hardware


def describe_machine() -> dict[str, Any]:
    """Processor, features, caches, cores, system and versions, as plain values."""
    here = hardware(measure=False)
    return {
        "processor": _processor_name() or here.name,
        "target": here.target,
        "features": list(here.features),
        "cores": here.parallel_units,
        "caches": dict(zip(("l1", "l2", "l3"), here.caches, strict=True)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bitwright": version,
    }


def in_one_line(machine: dict[str, Any]) -> str:
    """The description as text."""
    features = " ".join(machine.get("features", ())) or "no vector features"
    names = (machine.get(key, "?") for key in ("processor", "cores", "system", "bitwright"))
    processor, cores, of, own = names
    return f"{processor}, {cores} cores, {features}, {of}, bitwright {own}"


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()
