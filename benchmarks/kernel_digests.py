"""Digests of the kernels of compiled models, to find out which kernels a source change affects.

    python benchmarks/kernel_digests.py MODEL ... [--target avx2] [--precision mixed_bf16] [-o OUT]
    python benchmarks/kernel_digests.py --compare BEFORE AFTER

The name and comments of a kernel are not part of its digest. One line per kernel: model, digest,
number of calls.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

import bitwright as bw
import bitwright.backends.cpu.lowering.registered as lowerings
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.passes.manager import run_passes
from bitwright.passes.precision.policy import policy
from bitwright.pipeline import CPU, INFERENCE, _policy_passes, lower_integer
from bitwright.target import named

assert lowerings.__name__  # importing it registers the lowerings


def digests(path: Path, target: str, precision: str) -> Counter[str]:
    chosen = policy(precision)
    graph = run_passes(bw.load(path), INFERENCE)
    if not chosen.is_plain:
        graph = run_passes(graph, (lower_integer, *_policy_passes(chosen)))
    ctx = Lowering(run_passes(graph, CPU), named(target))
    ctx.run()
    calls = Counter(getattr(step, "kernel", "") for step in ctx.schedule.steps)
    found: Counter[str] = Counter()
    for name, kernel in ctx.kernels.items():
        found[digest(ctx.text(kernel), name)] += calls[name]
    return found


def digest(text: str, name: str) -> str:
    lines = [line for line in text.replace(name, "kernel").splitlines() if ";" not in line[:4]]
    plain = re.sub(r"\s+;.*", "", "\n".join(lines))
    numbers: dict[str, str] = {}  # values count in the order in which the text has them
    plain = re.sub(
        r"%[a-z]+\d+|\b[a-z]+\d+(?=:)",
        lambda m: "%" + numbers.setdefault(m[0].lstrip("%"), f"n{len(numbers)}"),
        plain,
    )
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def compare(before: Path, after: Path) -> int:
    sides = [sorted(path.read_text().splitlines()) for path in (before, after)]
    gone, new = (Counter(a) - Counter(b) for a, b in (sides, sides[::-1]))
    for sign, rows in (("-", gone), ("+", new)):
        for row in rows.elements():
            print(sign, row)
    print(f"{len(sides[0])} kernels before, {len(sides[1])} after, {sum(gone.values())} changed")
    return bool(gone or new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--target", default="host")
    parser.add_argument("--precision", default="f32")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    rows = []
    for path in options.models:
        found = digests(path, options.target, options.precision)
        rows += [f"{path.stem} {key} {calls}" for key, calls in sorted(found.items())]
    text = "".join(f"{row}\n" for row in rows)
    if options.output:
        options.output.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
