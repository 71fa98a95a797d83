"""Prints the lowest versions that pyproject.toml declares, as pip takes them, one a line.

python .ci/floors.py            numpy==2.2.0 ...        what the package depends on
python .ci/floors.py images     the same, and an extra
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def floors(*extras: str) -> list[str]:
    """`name==version` of every requirement; one without a lower bound is an error."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = []
    for requirement in wanted:
        matched = re.match(r"([\w.-]+)[^,;]*?>=\s*([\d.]+)", requirement)
        if matched is None:
            raise SystemExit(f"{requirement!r} declares no lowest version")
        found.append(f"{matched[1]}=={matched[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(floors(*sys.argv[1:])))
