"""A file imports only from its own folder or from folders above it in ORDER.

Imports anywhere in a file count: inside functions and under TYPE_CHECKING too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "bitwright"
ORDER = (
    ("errors", "lazy", "knobs", "cpuid", "system", "warn", "aliases", "__version__"),
    ("ir",),
    ("target",),
    ("ops",),
    ("rewrite",),
    ("frontend",),
    ("autodiff",),
    ("passes",),
    ("lir",),
    ("backends",),
    ("executable",),  # what the pipeline makes
    ("pipeline",),
    ("compiler",),  # the pipeline with a memory
    ("machine",),
    ("nn",),
    ("quant",),
    ("drift",),
    ("train",),
    ("export",),
    ("proof",),  # needs the compiler and the exported file
    ("deploy",),
    ("onnx_backend",),
    ("tuning",),
    ("llm",),
    ("demo",),  # a model and its data, without imports
    ("report",),
    ("__init__",),  # the public names: `bitwright` itself
    ("cli", "__main__"),
)
LEVELS = {part: level for level, parts in enumerate(ORDER) for part in parts}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(file: Path, source: Path = SOURCE) -> str:
    """The folder or top-level file that a file belongs to."""
    first = file.relative_to(source).parts[0]
    return first.removesuffix(".py")


def is_part(name: str, source: Path) -> bool:
    """Whether `bitwright.name` is a folder or file, and not a public name of `bitwright`."""
    here = bool(name) and ((source / name).is_dir() or (source / f"{name}.py").is_file())
    return name in LEVELS or here


def imports(file: Path, source: Path = SOURCE) -> Iterator[tuple[int, str]]:
    """Line and part of every import of bitwright in a file."""
    package = ["bitwright", *file.relative_to(source).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "bitwright":
                within = name[1] if len(name) > 1 else ""
                yield node.lineno, within if is_part(within, source) else "__init__"


def faults(file: Path, source: Path = SOURCE) -> list[str]:
    own = part_of(file, source)
    found = []
    for line, part in imports(file, source):
        if part not in LEVELS:
            found.append(f"{file.name}:{line}: {part} has no place in ORDER")
        elif part != own and LEVELS[part] > LEVELS[own]:
            found.append(f"{file.name}:{line}: {own} imports {part}, which stands below it")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_only_from_above(file):
    assert part_of(file) in LEVELS, f"{part_of(file)} has no place in ORDER"
    assert not faults(file)


@pytest.mark.parametrize(
    "text, number",
    [
        ("from bitwright.ir.graph import Graph", 0),
        ("from bitwright.errors import GraphError\nimport numpy", 0),
        ("from bitwright.ops import registry\nfrom . import registry", 0),
        ("def f():\n    from bitwright.passes import manager", 1),
        ("import bitwright.cli", 1),
        ("from bitwright import cli, errors", 1),
        ("from ..passes import manager", 1),
        ("from .. import rewrite", 1),
        ("import bitwright as bw", 1),
        ("from bitwright import compile", 1),
    ],
)
def test_the_check_finds_what_it_should(tmp_path, text, number):
    file = tmp_path / "ops" / "example.py"
    file.parent.mkdir()
    file.write_text(text)
    assert len(faults(file, tmp_path)) == number
