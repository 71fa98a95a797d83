"""What pyproject.toml declares: lowest versions, extras, facts about the project."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

import bitwright as bw

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def floors_script():
    spec = importlib.util.spec_from_file_location("floors", ROOT / ".ci" / "floors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_declares_a_lowest_version():
    found = dict(line.split("==") for line in floors_script().floors())
    names = {re.match(r"[\w.-]+", one)[0] for one in PROJECT["dependencies"]}
    assert found.keys() == names == {"numpy", "ml_dtypes", "onnx", "llvmlite", "rich", "click"}
    assert floors_script().floors("images")[-1].startswith("pillow==")
    for name, version in found.items():
        (line,) = [one for one in PROJECT["dependencies"] if one.startswith(name)]
        assert f">={version}" in line


def test_a_dependency_without_one_is_refused(tmp_path, monkeypatch):
    module = floors_script()
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy<3"]\n')
    monkeypatch.setattr(module, "PROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(SystemExit, match="declares no lowest version"):
        module.floors()


def test_the_make_target_and_ci_use_them():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "test-floors:" in makefile and ".ci/floors.py" in makefile
    assert "make test-floors" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    listed = re.search(r"FLOORS_TESTS := (.*)", makefile.replace("\\\n", " "))[1].split()
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_no_extra_pins_torch():
    (torch,) = [one for one in PROJECT["optional-dependencies"]["torch"] if one.startswith("torch")]
    assert torch.startswith("torch>=") and "==" not in torch
    assert {"torch", "yaml", "images", "bench"} <= PROJECT["optional-dependencies"].keys()


def test_facts_about_the_project():
    assert PROJECT["version"] == bw.__version__
    assert PROJECT["authors"] == [{"name": "The bitwright authors"}]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= PROJECT["urls"].keys()
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    assert "Typing :: Typed" in PROJECT["classifiers"]
    lowest = re.search(r">=3\.(\d+)", PROJECT["requires-python"])[1]
    assert f"Programming Language :: Python :: 3.{lowest}" in PROJECT["classifiers"]
    assert sys.version_info >= (3, int(lowest))
    assert "pip install bitwright" in (ROOT / "README.md").read_text(encoding="utf-8")
