"""The table of real models holds together: no network is needed to see that."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from models import MODELS, YARDSTICK  # noqa: E402
from models.draw import Draw  # noqa: E402
from models.packages import read_member  # noqa: E402
from models.table import F32_LIMIT  # noqa: E402


def test_names_are_given_once():
    names = [*(model.name for model in MODELS), *YARDSTICK]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_recipe_gives_arrays_and_says_why_it_is_lenient(model):
    feeds = model.feed(Draw(), *model.sizes[0])
    assert all(isinstance(array, np.ndarray) for array in feeds.values())
    assert (model.limit > F32_LIMIT) == bool(model.why)
    assert re.fullmatch(r"pypi:[\w.-]+==[\w.]+|npm:@?[\w./-]+@[\w.]+", model.package)


def test_documentation_names_every_model():
    text = (ROOT / "docs" / "models.md").read_text()
    missing = [m for m in MODELS if m.name not in text or m.package.split(":")[1] not in text]
    assert [model.name for model in missing] == []


def test_archive_is_read_and_not_unpacked(tmp_path):
    wheel, tar = tmp_path / "a.whl", tmp_path / "a.tgz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../outside/model.onnx", b"zip")
        archive.writestr("other.onnx", b"other")
    (tmp_path / "file").write_bytes(b"tar")
    with tarfile.open(tar, "w:gz") as archive:
        archive.add(tmp_path / "file", "/absolute/model.onnx")
    assert read_member(wheel, r"model\.onnx$") == b"zip"
    assert read_member(tar, r"model\.onnx$") == b"tar"
    with pytest.raises(LookupError, match="2 files match"):
        read_member(wheel, r"\.onnx$")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz", "a.whl", "file"]
