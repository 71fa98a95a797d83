"""Files of one kind in a folder, sorted by name; links out of the folder are errors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from bitwright.errors import CalibrationError


def files_in(folder: Path, suffixes: Collection[str], *, nested: bool = False) -> list[Path]:
    """The files with these suffixes; `nested` includes subfolders."""
    home = folder.resolve()
    found = folder.rglob("*") if nested else folder.iterdir()
    files = sorted(file for file in found if file.suffix.lower() in suffixes)
    for file in files:
        if not file.resolve().is_relative_to(home):
            raise CalibrationError(
                f"{file.name} points outside its folder", hint="Copy the file into the folder."
            )
        if not file.is_file():
            raise CalibrationError(f"{file.name} is not a regular file")
    return files
