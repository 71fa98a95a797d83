"""What Triton's compiler makes of the GPU kernels of a model, without a GPU.

    python benchmarks/gpu_static.py                       # the sample graphs of every kernel family
    python benchmarks/gpu_static.py minilm --batch 64 --recipe int8 --all

One line per kernel and configuration: registers, spilled bytes, shared memory, and which
instructions the PTX
has (wgmma, tma, cp_async, ...). `--all` compiles all candidates of tuning, not only the first.
Sizes come from
the graph of the model, which is built with random weights. Exits with 1 if a kernel does not
compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import gpu_models

from bitwright.backends.gpu.codegen.static import compile_static
from bitwright.backends.gpu.lowering.build import build
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.errors import BitwrightError


def machine(capability: tuple[int, int]) -> Machine:
    """A stand-in for a device of this capability."""
    small = capability < (9, 0)
    return Machine(
        f"sm_{capability[0]}{capability[1]}",
        capability,
        108 if small else 132,
        (163 if small else 227) << 10,
        (40 if small else 50) << 20,
        interpreted=False,
    )


def sources(name: str, options: argparse.Namespace, capability: tuple[int, int]) -> dict[str, Any]:
    """The kernels of a model, and of every graph of `gpu_models.SAMPLES` if the name is empty."""
    found: dict[str, Any] = {}
    graphs = (
        [gpu_models.lowered(name, options.batch, options.recipe, options.precision)]
        if name
        else gpu_models.sample_graphs()
    )
    for graph in graphs:
        artifact = build(graph, machine(capability))
        found |= artifact.sources
        for step in artifact.fallbacks:
            print(f"fallback: {step.op.op}: {step.why}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", nargs="?", default="", help="minilm, bert, resnet50; or empty")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--recipe", default="")
    parser.add_argument("--precision", default="mixed_bf16")
    parser.add_argument("--capability", default="8.0,9.0")
    parser.add_argument("--all", action="store_true", help="all candidates of tuning")
    parser.add_argument("--families", action="store_true", help="one kernel of each family")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", default="", help="write the reports to a file")
    options = parser.parse_args()
    reports: list[dict[str, Any]] = []
    failed = 0
    for text in options.capability.split(","):
        major, minor = (int(part) for part in text.split("."))
        seen: set[str] = set()
        for name, source in sources(options.model, options, (major, minor)).items():
            if options.only not in name or (options.families and source.family in seen):
                continue
            seen.add(source.family)
            for config in source.configs if options.all else source.configs[:1]:
                try:
                    found = compile_static(source, config, (major, minor))
                except BitwrightError as error:
                    failed += 1
                    print(f"sm_{major}{minor} {name}: {error}")
                    continue
                reports.append(vars(found))
                print(
                    f"sm_{major}{minor} {name:52s} {config.name:48s} regs {found.registers:3d}"
                    f" spills {found.spills:4d} shared {found.shared / 1024:6.1f} KiB"
                    f" {found.instructions}"
                )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(reports, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
