"""Small models of the benchmarks on the GPU backend, beside the CPU; and errors of machines
without a GPU."""

import importlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from on_gpu import compiled

import bitwright as bw
from bitwright.backends.gpu import requirements
from bitwright.backends.gpu.runtime import device
from bitwright.errors import BitwrightError

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
gpu_models = importlib.import_module("gpu_models")


@pytest.mark.parametrize("recipe", ["", "int8"])
@pytest.mark.parametrize("name, precision", [("minilm", "mixed_bf16"), ("resnet50", "mixed")])
def test_models_are_close_to_the_cpu(name, precision, recipe):
    graph, feeds = gpu_models.graph_of(name, 2, recipe, tiny=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = compiled(graph, fallbacks=True, precision=precision).run(feeds)
    wanted = bw.compile(graph, precision=precision).run(feeds)
    for key, want in wanted.items():
        one, two = got[key].astype(np.float64), want.astype(np.float64)
        assert np.linalg.norm(one - two) <= 0.02 * np.linalg.norm(two)


def test_a_missing_package_is_named(monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(requirements.importlib, "import_module", refuse)
    with pytest.raises(BitwrightError, match=r"needs the package 'triton'.*bitwright\[gpu\]"):
        requirements._load("triton")


def test_a_machine_without_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(device, "interpreted", lambda: False)
    find = device.current_device.__wrapped__
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(BitwrightError, match="needs PyTorch with CUDA"):
        find()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BitwrightError, match="finds no GPU"):
        find()


def test_the_interpreter_has_no_times():
    b = bw.Builder("doubled")
    exe = compiled(b.build(y=b.mul(b.input("x", "f32[3]"), 2.0)))
    if exe.engine.device.is_interpreted:
        with pytest.raises(BitwrightError, match="say nothing about a GPU"):
            bw.profile(exe)
