"""The Ray Serve deployment: its arguments, and a local Ray where it is installed."""

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("starlette", reason="the starlette package is not installed")
pytest.importorskip("httpx", reason="the httpx package is not installed")
pytest.importorskip("ray.serve", reason="ray is not installed")
import httpx
import numpy as np

from bitwright import demo
from bitwright.errors import BitwrightError
from bitwright.llm.serve.ray_serve import build
from bitwright.llm.serve.run import bind


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "'models' is missing"),
        ({"models": "a.gguf", "slot": "3"}, "no argument 'slot'; expected cache, context, cpus"),
        ({"models": "a.gguf", "slots": "many"}, "is not a number"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    with pytest.raises(BitwrightError, match=message):
        build(arguments)


@pytest.mark.slow
def test_a_local_ray_serves_a_model():
    import ray
    from ray import serve

    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"models": f"demo={demo.model_path()}", "threads": "1"}), name="bitwright")
        address = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        inputs, _ = demo.held_out()
        (name,) = inputs
        body = {"inputs": {name: np.asarray(inputs[name][:2]).tolist()}}
        found = httpx.post(f"{address}/v1/infer", json=body, timeout=60).json()
        assert len(found["outputs"]["logits"]) == 2
    finally:
        serve.shutdown()
        ray.shutdown()
