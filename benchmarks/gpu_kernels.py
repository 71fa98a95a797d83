"""GPU kernels against the library's, on cold data.

    python benchmarks/gpu_kernels.py [products rows convs] [--json FILE]      one table
    python benchmarks/gpu_kernels.py --sweep [--seconds 240] [products ...]   every tile candidate
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --tiny                a dry run, no GPU

A time is that of all kernels of a graph, as one CUDA graph over copies of all operands that rotate
through more memory than the L2 cache holds; the median of many replays. The factor is the library's
time (its bare bf16 product, or cuDNN's f16 convolution) over ours; the percentage is that of the
measured copy bandwidth (bytes as stored). Every result is checked against float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from gpu_cases import DEVICE, NATIVE, Case, cases

import bitwright as bw
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.runtime.launch import Kernel


class Compiled:
    """The launches of a case, bound to tensors."""

    def __init__(self, case: Case) -> None:
        self.case, self.exe = case, bw.compile(case.graph, target="cuda")
        missing = [step.why for step in self.exe.engine.fallbacks]
        assert not missing, missing
        found: list[Any] = []
        with torch.no_grad():
            self.result = self.exe.run(case.feeds)["y"]
            self.exe.engine.run_steps(case.feeds, lambda step, call: (found.append(call), call()))
        self.launches = found

    @property
    def error(self) -> float:
        """The largest difference: in steps of an 8-bit result, or relative to the largest value."""
        want = self.case.wanted({}).cpu().numpy()
        got = self.result.astype(np.float64)
        apart = float(np.abs(got - want).max())
        return apart if self.result.dtype == np.int8 else apart / float(np.abs(want).max())

    def calls(
        self, kernels: Mapping[int, Kernel] | None = None
    ) -> Callable[[], Callable[[], None]]:
        """A function that makes one launch of the chain on copies of its operands."""
        chosen = [(kernels or {}).get(n, one.kernel) for n, one in enumerate(self.launches)]

        def make() -> Callable[[], None]:
            copies: dict[tuple[int, Any], Any] = {}
            bound = []
            for one, kernel in zip(self.launches, chosen, strict=True):
                own = {}
                for name, given in one.tensors.items():
                    key = given.data_ptr(), given.dtype
                    copies.setdefault(key, given.clone())
                    own[name] = copies[key]
                bound.append((kernel, own, one.sizes))

            def run() -> None:
                for kernel, own, sizes in bound:
                    kernel.launch(own, sizes)

            return run

        return make


def cold_seconds(make: Callable[[], Callable[[], Any]], size: float, rounds: int = 15) -> float:
    """The median time of a call, on copies of its operands that rotate through 4 L2 caches."""
    if not NATIVE:
        call, begin = make(), time.perf_counter()
        call()
        return time.perf_counter() - begin
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = int(max(2, min(64, 4 * l2 / max(size, 1.0) + 1)))
    calls = [make() for _ in range(count)]
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 24 // count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for number in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number > 1:
            times.append(begin.elapsed_time(end) * 1e-3 / (repeats * count))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a copy on the device, read and written."""
    size = 1 << 31 if NATIVE else 1 << 22
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    seconds = cold_seconds(lambda: lambda: target.copy_(source), float(size))
    return 2 * size / seconds


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    compiled = Compiled(case)
    row: dict[str, Any] = {"group": case.group, "case": case.name, "error": compiled.error}
    row["right"] = bool(compiled.error <= case.tolerance)
    row["kernels"] = [one.kernel.source.family for one in compiled.launches]
    row["configs"] = [one.kernel.config.name for one in compiled.launches]
    row["us"] = cold_seconds(compiled.calls(), case.bytes) * 1e6
    for name, peer in case.peers.items():
        try:
            row[name] = cold_seconds(peer, case.bytes) * 1e6
        except RuntimeError as error:
            row[name] = str(error).split("\n")[0][:60]
    row["tera_ops"] = case.operations / row["us"] / 1e6
    row["bandwidth_share"] = case.bytes / (row["us"] * 1e-6) / bandwidth
    first = next((row[name] for name in case.peers if isinstance(row.get(name), float)), None)
    row["library_share"] = first / row["us"] if first else None
    return row


def show(row: Mapping[str, Any]) -> str:
    peers = "  ".join(
        f"{name} {value:.1f}"
        for name, value in row.items()
        if name[:1] in "c_" and isinstance(value, float)
    )
    share = f"{row['library_share']:.2f}x" if row["library_share"] else "-"
    return (
        f"{row['case']:44s} {row['us']:9.1f} us {share:>7s} {row['tera_ops']:7.1f} TOP/s "
        f"{100 * row['bandwidth_share']:5.1f}% of copy  error {row['error']:.1e}"
        f"{'' if row['right'] else ' WRONG'}   {peers}"
    )


# the sweep over tiles


def variants(source: KernelSource) -> list[Config]:
    """The candidates of a source, and variations of its best ones."""
    found = {config.name: config for config in source.configs}
    for config in source.configs:
        if "PROGRAMS" not in config.constants:  # not the persistent form
            continue
        known = config.constants
        for changes in (
            *({"SUB": parts} for parts in (1, 2, 4) if known["BN"] // parts >= 16),
            {"GROUP": 4},
            {"GROUP": 16},
            {"FLATTEN": 0},
            {"PROGRAMS": 2 * known["PROGRAMS"]},
        ):
            one = Config({**known, **changes}, config.num_warps, config.num_stages)
            found.setdefault(one.name, one)
        for stages in {max(config.num_stages - 1, 2), config.num_stages + 1}:
            one = Config(known, config.num_warps, stages)
            found.setdefault(one.name, one)
    return list(found.values())


def sweep(case: Case, seconds: float) -> list[dict[str, Any]]:
    """The time of each candidate of the case's longest kernel, sorted."""
    compiled = Compiled(case)
    times = [
        cold_seconds(lambda: lambda: one(), case.bytes, 3)  # noqa: B023
        for one in compiled.launches
    ]
    place = times.index(max(times))
    launch = compiled.launches[place]
    source = launch.kernel.source
    end = time.perf_counter() + seconds

    def prepare(config: Config) -> tuple[Config, Any]:
        note = f"\n# {config.name}"
        own = replace(
            source,
            body=source.body + note,
            native_body=source.native_body and source.native_body + note,
        )
        kernel = Kernel(own, config)
        try:
            kernel.compile(launch.tensors, launch.sizes)
        except Exception as error:  # reported in the row
            return config, error
        return config, kernel

    rows = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 12) if NATIVE else 1) as pool:
        for config, kernel in pool.map(prepare, variants(source)):
            row: dict[str, Any] = {
                "case": case.name,
                "kernel": source.family,
                "config": config.name,
            }
            if time.perf_counter() > end:
                continue
            try:
                if isinstance(kernel, Exception):
                    raise kernel
                row["us"] = cold_seconds(compiled.calls({place: kernel}), case.bytes, 7) * 1e6
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:80]}"
            row["is_static"] = config.name == source.configs[0].name
            rows.append(row)
    return sorted(rows, key=lambda row: row.get("us", 1e12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=["products", "rows", "convs"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=240, help="of the whole sweep")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {device_name()}", flush=True)
    rows: list[dict[str, Any]] = []
    chosen = list(cases(options.groups, options.tiny))
    if options.sweep:
        for case in chosen:
            found = sweep(case, options.seconds / len(chosen))
            rows += found
            for row in found[:5] + [row for row in found[5:] if row["is_static"]]:
                mark = "*" if row["is_static"] else " "
                print(
                    f"{row['case']:40s} {mark} {row.get('us', 0):9.1f} us  {row['config']}",
                    flush=True,
                )
    else:
        bandwidth = copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
        for case in chosen:
            try:
                rows.append(measure(case, bandwidth))
                print(show(rows[-1]), flush=True)
            except Exception as error:
                rows.append({"case": case.name, "failed": f"{type(error).__name__}: {error}"[:300]})
                print(f"{case.name:44s} {rows[-1]['failed'][:120]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def device_name() -> str:
    return torch.cuda.get_device_name() if NATIVE else "Triton's interpreter"


if __name__ == "__main__":
    main()
