"""Runs ONNX's official test cases: the generated node cases and the models on disk.

    for result in run_all(): print(result.name, result.status, result.reason)

A case passes when every output has exactly the expected type and shape and its values are within
rtol 1e-3 and atol 1e-7 (bfloat16: two units in the last place), as in ONNX's own runner.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, numpy_helper

from bitwright.errors import BitwrightError, ImportModelError, RunError
from bitwright.frontend.onnx import load
from bitwright.ir import Graph
from bitwright.ops.core.interpret import run

RTOL, ATOL = 1e-3, 1e-7
FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")
PASS, WRONG, REFUSED, RANDOM = "pass", "wrong", "refused", "random"
"""The status of a case; of a random case only types and shapes are compared."""
RANDOM_OPS = frozenset({"random_uniform", "random_normal"})
DataSet = tuple[Sequence[Any], Sequence[Any]]
Prepare = Callable[[Graph], Callable[[list[Any]], list[Any]]]


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelProto
    data: list[DataSet]
    kind: str = "node"
    rtol: float = RTOL
    atol: float = ATOL


@dataclass(frozen=True)
class Result:
    name: str
    kind: str
    ops: tuple[str, ...]
    status: str
    reason: str = ""
    fallback_ops: tuple[str, ...] = ()
    """Ops that ran as interpreter fallbacks."""


def node_cases() -> list[Case]:
    """The cases that the onnx package generates, one or a few nodes each."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [
        Case(c.name, c.model, list(c.data_sets or ()), "node", c.rtol, c.atol)
        for c in found
        if c.model is not None
    ]


def disk_cases() -> Iterator[Case]:
    """The models in the onnx package, with their data."""
    root = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for kind in FOLDERS:
        for folder in sorted((root / kind).iterdir()):
            model = onnx.load(str(folder / "model.onnx"))
            sets = sorted(folder.glob("test_data_set_*"))
            yield Case(folder.name, model, [_data_set(model, s) for s in sets], kind)


def _data_set(model: ModelProto, folder: Path) -> DataSet:
    graph = model.graph
    return (
        [
            _read(folder / f"input_{i}.pb", v)
            for i, v in enumerate(graph.input)
            if _exists(folder, i)
        ],
        [_read(folder / f"output_{i}.pb", v) for i, v in enumerate(graph.output)],
    )


def _exists(folder: Path, index: int) -> bool:
    return (folder / f"input_{index}.pb").exists()


def _read(path: Path, info: onnx.ValueInfoProto) -> Any:
    kind = info.type.WhichOneof("value")
    protos: dict[Any, Any] = {"sequence_type": SequenceProto, "optional_type": OptionalProto}
    proto = protos.get(kind, TensorProto)()
    proto.ParseFromString(path.read_bytes())
    return plain(proto)


def plain(value: Any) -> Any:
    """Test data as numpy arrays and lists of them."""
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, OptionalProto):
        return numpy_helper.to_optional(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def interpreted(graph: Graph) -> Callable[[list[Any]], list[Any]]:
    """A function that interprets the graph on inputs in its order."""
    names = [value.name for value in graph.inputs]
    return lambda inputs: list(run(graph, dict(zip(names, inputs, strict=True))).values())


def run_all(
    cases: Iterable[Case] | None = None, prepare: Prepare = interpreted
) -> Iterator[Result]:
    """The result of every case; `prepare` makes an imported graph executable.

    The fallbacks of a result are those of the executable's `fallback_ops`, if it has that
    attribute, else the nodes that have no mapping.
    """
    if cases is None:
        cases = (*node_cases(), *disk_cases())
    for case in cases:
        yield run_case(case, prepare)


def run_case(case: Case, prepare: Prepare = interpreted) -> Result:
    ops = tuple(dict.fromkeys(node.op_type for node in case.model.graph.node))

    def result(status: str, reason: str = "", fallbacks: tuple[str, ...] = ()) -> Result:
        return Result(case.name, case.kind, ops, status, reason, fallbacks)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = load(case.model)
            is_random = any(node.op in RANDOM_OPS for _, node in graph.walk())
            execute = prepare(graph)
            fallbacks = getattr(execute, "fallback_ops", fallback_ops(graph))
            for inputs, expected in case.data:
                found = execute([plain(x) for x in inputs])
                fault = compare(expected, found, case, values=not is_random)
                if fault:
                    return result(WRONG, fault, fallbacks)
    except (ImportModelError, RunError) as error:
        return result(REFUSED, str(error))
    except BitwrightError as error:
        return result(REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return result(WRONG, f"crashed with {type(error).__name__}: {error}")
    return result(RANDOM if is_random else PASS, fallbacks=fallbacks)


def fallback_ops(graph: Graph) -> tuple[str, ...]:
    """The ONNX ops of the graph that have no mapping."""
    found = (node.attrs["op_type"] for _, node in graph.walk() if node.op == "host")
    return tuple(dict.fromkeys(found))


def compare(expected: Sequence[Any], found: Sequence[Any], case: Case, values: bool = True) -> str:
    """What differs, or an empty string."""
    if len(expected) != len(found):
        return f"{len(found)} outputs instead of {len(expected)}"
    for index, (want, have) in enumerate(zip(expected, found, strict=True)):
        if fault := _differs(plain(want), have, case, values):
            return f"output {index}: {fault}"
    return ""


def _differs(want: Any, have: Any, case: Case, values: bool) -> str:
    if isinstance(want, list) or isinstance(have, list):
        if not isinstance(have, list) or not isinstance(want, list) or len(want) != len(have):
            return "another kind or length of sequence"
        faults = (_differs(a, b, case, values) for a, b in zip(want, have, strict=True))
        return next(filter(None, faults), "")
    if want is None or have is None:
        return "" if want is have else "an optional is present on one side only"
    want, have = np.asarray(want), np.asarray(have)
    if want.shape != have.shape:
        return f"shape {list(have.shape)} instead of {list(want.shape)}"
    if want.dtype.kind in "OUS":
        same = have.dtype.kind in "OUS" and (want.astype(str) == have.astype(str)).all()
        return "" if same else "other strings"
    if want.dtype != have.dtype:
        return f"element type {have.dtype} instead of {want.dtype}"
    return _values_differ(want, have, case) if values else ""


def _values_differ(want: Any, have: Any, case: Case) -> str:
    rtol = max(case.rtol, 2**-6) if want.dtype.name == "bfloat16" else case.rtol
    if want.dtype.kind == "c":
        wide: Any = np.complex128
    else:
        wide = np.int64 if want.dtype.kind in "iub" else np.float64
    close = np.isclose(have.astype(wide), want.astype(wide), rtol, case.atol, equal_nan=True)
    if close.all():
        return ""
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    return f"{(~close).sum()} of {close.size} values, first {have[place]} instead of {want[place]}"
