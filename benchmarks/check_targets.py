"""Compares the predictions of `bitwright check` with what ONNX Runtime and OpenVINO really do.

python benchmarks/check_targets.py FILE.onnx ...

Prints for each file and runtime the number of quantized nodes, how many are fused, and how many the
runtime treats as predicted; then every disagreement.
"""

import sys
import warnings
from pathlib import Path

from bitwright.deploy.truth import PACKAGES, compare_with_runtime


def main(files: list[str]) -> int:
    warnings.simplefilter("ignore")
    nodes = dict.fromkeys(PACKAGES, 0)
    agreed = dict.fromkeys(PACKAGES, 0)
    wrong = []
    print(f"{'file':32} {'runtime':16} {'nodes':>6} {'fused':>6} {'float':>6} {'agree':>6}")
    for file in files:
        for target in PACKAGES:
            found = compare_with_runtime(file, target)
            nodes[target] += found.nodes
            agreed[target] += found.agreed
            fused = found.statuses["fused"] + found.statuses["unsafe"]
            print(
                f"{Path(file).name:32} {target:16} {found.nodes:6} {fused:6} "
                f"{found.statuses['fallback']:6} {found.agreed:6}",
                flush=True,
            )
            wrong += [(Path(file).name, target, *pair) for pair in found.wrong]
    for target in PACKAGES:
        share = agreed[target] / max(1, nodes[target])
        print(f"{target}: {agreed[target]} of {nodes[target]} nodes as predicted ({share:.2%})")
    for name, target, verdict, actual in wrong:
        what = f"{verdict.status} ({verdict.kernel or verdict.reason})"
        print(f"{name} {target}: {verdict.op} {verdict.node!r}: {what}: {actual}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
