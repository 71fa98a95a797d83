"""The public names: what runs, what type checkers see, and what is imported for them."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import bitwright as bw

SOURCE = Path(bw.__file__).parent
PACKAGES = ("bitwright", "bitwright.quant", "bitwright.ir")

USES = """
from pathlib import Path

import numpy as np

import bitwright as bw
from bitwright.ir import Graph
from bitwright.quant import CalibrationRecord, Calibrator, Ranges

exe: bw.Executable = bw.compile("m.onnx", threads=2, precision="f32")
outputs: dict[str, object] = exe({"x": np.zeros(3)})
graph: Graph = bw.load(Path("m.onnx"))
ranges: Ranges = bw.calibrate(graph, [])
record: CalibrationRecord = ranges.record("int8")
calibrator = Calibrator(graph, ["x"])
names: tuple[str, ...] = exe.input_names
report: str = bw.quantize("m.onnx", []).report.summary()
version: str = bw.__version__
"""
FAULTS = {
    'bw.compile("m.onnx", threads="two")': "arg-type",
    "bw.nothing": "attr-defined",
    "number: int = bw.load('m.onnx')": "assignment",
}


def tree_of(package):
    module = importlib.import_module(package)
    return module, ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


def imported_for_checkers(tree):
    """Name and module of every import under TYPE_CHECKING."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                found |= {alias.name: line.module for alias in line.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_checkers_see_what_is_imported_when_it_is_used(package):
    module, tree = tree_of(package)
    assert imported_for_checkers(tree) == module._HOME


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_are_listed_and_there(package):
    module, _ = tree_of(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module._HOME) <= set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


def test_a_star_import_brings_them():
    found = {}
    exec("from bitwright.quant import *", found)
    assert {"Calibrator", "insert_q_dq", "Ranges"} <= found.keys()


def public():
    for package in ("bitwright", "bitwright.quant"):
        module = importlib.import_module(package)
        for name in module.__all__:
            yield pytest.param(getattr(module, name), id=f"{package}.{name}")


def signatures(item):
    """Functions and public methods, with their own names."""
    if inspect.isfunction(item):
        yield item.__qualname__, item
    elif inspect.isclass(item) and item.__module__.startswith("bitwright"):
        for name, member in vars(item).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(function) and not name.startswith("_"):
                yield function.__qualname__, function


@pytest.mark.parametrize("item", list(public()))
def test_public_functions_and_methods_are_annotated(item):
    for name, function in signatures(item):
        signature = inspect.signature(function)
        bare = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert not bare, f"{name} has parameters without a type: {bare}"
        assert signature.return_annotation is not signature.empty, f"{name} has no type of result"


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.slow
def test_a_type_checker_finds_right_uses_right_and_wrong_ones_wrong(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")

    def check(text):
        (tmp_path / "uses.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent"]
        command += ["--cache-dir", str(tmp_path / "cache"), "--config-file", ""]
        return subprocess.run(
            [*command, str(tmp_path / "uses.py")],
            capture_output=True,
            text=True,
            cwd=SOURCE.parent,
            check=False,
        ).stdout

    assert "Success" in check(USES)
    for fault, code in FAULTS.items():
        assert f"[{code}]" in check(f"{USES}\n{fault}\n")


def test_importing_is_quick_because_it_imports_little():
    code = (
        "import sys, bitwright; bitwright.__all__; "
        "print([m for m in sys.modules if m.startswith(('bitwright.', 'numpy', 'onnx', 'llvm'))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=SOURCE.parent,
    )
    assert found.stdout.strip() == "['bitwright.lazy']"
