"""`QuantizationSystem.benchmark`: times of quantized operations, with memory and error.

    summary = system.benchmark()
    summary.save("now.csv")
    print(summary.compare("before.json"))

Each row has the median and the quartiles after a warm-up; all sides are interleaved. The baseline
of a matmul is the compiled f32 product of the same sizes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.container import write_atomically
from bitwright.machine.timing import Timing, time_sides
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph
from bitwright.quant.core.measure import quality
from bitwright.quant.tensor.observer import quantize_tensor
from bitwright.quant.tensor.operations import qmatmul
from bitwright.quant.tensor.tensor import QuantizedTensor

_COLUMNS = (
    "operation", "dtype", "median_seconds", "low_quartile", "high_quartile", "rounds", "bytes",
    "sqnr_db", "times_f32",
)  # fmt: skip
_WARMUP = 3


@dataclass(frozen=True)
class BenchmarkRow:
    """One operation; figures that do not apply are None."""

    operation: str
    dtype: str
    timing: Timing
    nbytes: int
    """Of the tensors that it reads."""
    sqnr_db: float | None = None
    times_f32: float | None = None
    """The speed, relative to f32."""

    def values(self) -> dict[str, Any]:
        low, high = self.timing.quartiles
        return dict(
            zip(
                _COLUMNS,
                (
                    self.operation,
                    self.dtype,
                    self.timing.median,
                    low,
                    high,
                    len(self.timing.seconds),
                    self.nbytes,
                    self.sqnr_db,
                    self.times_f32,
                ),
                strict=True,
            )
        )


@dataclass(frozen=True)
class BenchmarkSummary:
    shape: tuple[int, int, int]
    threads: int
    rows: tuple[BenchmarkRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[BenchmarkRow]:
        return iter(self.rows)

    def as_json(self) -> dict[str, Any]:
        rows = [row.values() for row in self.rows]
        return {"shape": self.shape, "threads": self.threads, "rows": rows}

    def save(self, path: str | Path) -> None:
        """Write a .json or .csv file under a temporary name and rename it."""
        target = Path(path)
        if target.suffix == ".json":
            text = json.dumps(self.as_json(), indent=2) + "\n"
        elif target.suffix == ".csv":
            lines = io.StringIO()
            writer = csv.DictWriter(lines, _COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row.values() for row in self.rows)
            text = lines.getvalue()
        else:
            raise QuantizationError(
                "unknown kind of file", expected=".json or .csv", found=target.name
            )

        def write(file: IO[bytes]) -> None:
            file.write(text.encode())

        write_atomically(target, write)

    def compare(self, baseline: str | Path | BenchmarkSummary) -> dict[str, float]:
        """The baseline's median divided by this one's, by operation and type; above 1 is faster."""
        own = {(row.operation, row.dtype): row.timing.median for row in self.rows}
        if isinstance(baseline, BenchmarkSummary):
            rows: Any = baseline.as_json()["rows"]
        else:
            try:
                rows = json.loads(Path(baseline).read_bytes())["rows"]
                rows = [dict(row) for row in rows]
            except (ValueError, KeyError, TypeError) as error:
                raise QuantizationError(
                    f"{baseline} is not a saved benchmark", found=str(error)
                ) from None
        found = {}
        for row in rows:
            key, before = (row.get("operation"), row.get("dtype")), row.get("median_seconds")
            if key in own and isinstance(before, (int, float)):
                found[f"{key[0]} {key[1]}"] = before / max(own[key], 1e-9)
        return found

    def __str__(self) -> str:
        lines = [f"{'x'.join(map(str, self.shape))}, {self.threads} threads"]
        for row in self.rows:
            low, high = row.timing.quartiles
            line = f"{row.operation:10} {row.dtype:9} {row.timing.median * 1e6:9.1f} us"
            line += f" ({low * 1e6:.1f}-{high * 1e6:.1f})  {row.nbytes / 1e3:9.1f} kB"
            line += "" if row.sqnr_db is None else f"  {row.sqnr_db:5.1f} dB"
            line += "" if row.times_f32 is None else f"  {row.times_f32:.2f} times f32"
            lines.append(line)
        return "\n".join(lines)


def run_benchmark(
    threads: int,
    shape: tuple[int, int, int] = (256, 512, 512),
    dtypes: Sequence[str] = ("int8", "uint8", "int4"),
    seconds: float = 1.0,
) -> BenchmarkSummary:
    """Time quantize, dequantize and matmul of sizes (m, k, n) for each type."""
    if len(shape) != 3 or min(shape) < 1 or not dtypes:
        raise QuantizationError(
            "nothing to time", expected="sizes (m, k, n) and types", found=(shape, list(dtypes))
        )
    rng, (m, k, n) = np.random.default_rng(0), shape
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((m, k), (k, n)))
    b = Builder("f32")
    exe = compile_graph(b.build(y=b.matmul(b.input("x", f"f32[{m}, {k}]"), b.constant(w))))
    sides: dict[tuple[str, str], Any] = {("matmul", "f32"): lambda: exe.run({"x": x})}
    tensors: dict[str, tuple[QuantizedTensor, QuantizedTensor]] = {}
    for name in dtypes:
        weight = name if quant_types.get(name).is_signed else name.removeprefix("u")
        qx, qw = quantize_tensor(x, name, "minmax"), quantize_tensor(w, weight, "minmax", axis=1)
        tensors[name] = qx, qw
        one = qx.parameters
        sides["quantize", name] = lambda one=one: QuantizedTensor.quantize(x, one)
        sides["dequantize", name] = lambda qx=qx: qx.dequantize()
        sides["matmul", name] = lambda qx=qx, qw=qw: qmatmul(qx, qw)
    timings = time_sides(sides, seconds, warmup=_WARMUP)
    plain, exact = timings["matmul", "f32"], x.astype(np.float64) @ w.astype(np.float64)
    rows = []
    for (operation, name), timing in timings.items():
        if name not in tensors:
            rows.append(BenchmarkRow(operation, name, timing, x.nbytes + w.nbytes))
            continue
        qx, qw = tensors[name]
        if operation == "matmul":
            sqnr = quality(exact, qmatmul(qx, qw)).sqnr
            ratio = timing.times_faster_than(plain)
            rows.append(BenchmarkRow(operation, name, timing, qx.nbytes + qw.nbytes, sqnr, ratio))
        else:
            nbytes = x.nbytes if operation == "quantize" else qx.nbytes
            rows.append(BenchmarkRow(operation, name, timing, nbytes, quality(x, qx).sqnr))
    return BenchmarkSummary((m, k, n), threads, tuple(rows))
