"""The words that STYLE.md retired do not come back.

Prose: no retired word in sources and docs. Identifiers: no file, class, function or option of the
sources has a retired name. `aliases.py` and the glossary list old names and are exempt.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
EXEMPT = {ROOT / "src/bitwright/aliases.py", ROOT / "docs/glossary.md"}
TEXTS = (".py", ".md", ".txt", ".toml", ".h", ".c", ".js", ".css", ".html", ".json", ".yaml")
WORDS = {
    "codes, coded, coding": r"(?<![a-z])(codes|coded|codings?)(?![a-z])",
    "relieve": r"(?<![a-z])relieves?d?(?![a-z])",
    "host step": r"host[ _-]steps?(?![a-z])",
    "front door": r"front[ _-]?doors?(?![a-z])",
    "meeting of the threads": r"meetings? of (the )?threads",
    "Taps": r"(?-i:(?<![A-Za-z])Taps(?![a-z]))",
    "Evidence": r"(?-i:(?<![A-Za-z])Evidence(?![a-z]))",
}
PATTERNS = {word: re.compile(pattern, re.IGNORECASE) for word, pattern in WORDS.items()}

CLASSES = {
    *("Code", "Coded", "Coding", "Site", "Evidence", "Gathering", "Collector", "Taps", "Probe"),
    *("Effects", "Stretch", "Restored"),
}
OPTIONS = {
    *("exact_sums", "few_bits", "widen_angles", "least_share", "share_in_8_bit", "guard_sqnr"),
    *("lowest_sqnr", "static_sqnr", "attention_sqnr", "in_codes"),
}
FUNCTIONS = OPTIONS | {
    *("coded", "relieve", "to_codes", "map_codes", "run_codes", "run_panels", "code_text"),
    *("_apart", "_stay"),
}
# Plain words that are retired as names only where they named something else.
LOCAL = {
    "src/bitwright/backends": {
        *("deal", "turned", "folds", "words", "halves", "numbers", "cells", "walk"),
        *("proved", "stored", "keep", "kept"),
    },
    "src/bitwright/quant": {"reach", "strength"},
    "src/bitwright/lir": {"Place"},
    "src/bitwright/system": {"keep", "kept"},
}
MODULES = {name.lower() for name in CLASSES} | {"code", "codes", "codings", *OPTIONS, "relieve"}


def prose():
    files = [file for folder in ("src", "docs") for file in sorted((ROOT / folder).rglob("*"))]
    texts = [f for f in (*files, ROOT / "README.md") if f.suffix in TEXTS and f.is_file()]
    return [file for file in texts if file not in EXEMPT]


def place(file, line=None):
    name = str(file.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"


@pytest.mark.parametrize("word", PATTERNS)
def test_word_is_gone(word):
    found = [
        f"{place(file, number)}: {line.strip()}"
        for file in prose()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PATTERNS[word].search(line)
    ]
    assert not found, f"{len(found)} lines say {word!r}:\n" + "\n".join(found)


def named(tree):
    """Kind, name and line of every class, function and option (parameter or class field)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield "option", item.target.id, item.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = ast.unparse(node.returns) if node.returns else ""
            is_refusal = node.name.startswith("_no_") and "str" in returns
            yield "refusal" if is_refusal else "function", node.name, node.lineno
            arguments = node.args
            for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield "option", item.arg, item.lineno


def is_retired(kind, name, local):
    """Whether a name is on the list; reasons for refusal are called why_not_x."""
    listed = {"class": CLASSES, "option": OPTIONS, "function": FUNCTIONS}.get(kind)
    return listed is None or name in listed or (kind != "option" and name in local)


def test_identifiers_are_gone():
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file in EXEMPT:
            continue
        local = set().union(*(names for at, names in LOCAL.items() if place(file).startswith(at)))
        if file.stem in MODULES | local:
            found.append(f"{place(file)}: file {file.stem}")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [
            f"{place(file, line)}: {kind} {name}"
            for kind, name, line in named(tree)
            if is_retired(kind, name, local)
        ]
    assert not found, f"{len(found)} retired names:\n" + "\n".join(found)
