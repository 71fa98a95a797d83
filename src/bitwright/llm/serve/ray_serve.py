"""The server as a Ray Serve deployment, for several replicas or machines.

    serve run bitwright.llm.serve.ray_serve:build models=model.gguf slots=8 replicas=2

Each replica loads the models; the path must exist on every machine. A conversation finds its
prefix in the cache only on the replica that answered it before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.llm.serve.settings import Settings
from bitwright.llm.text.library import need

_MODEL = {"threads": int, "context": int, "slots": int, "cache": str}
_LIMITS = {"max_queue": int, "max_tokens": int, "max_seconds": float}


def build(arguments: Mapping[str, str]) -> Any:
    """A Ray Serve application.

    Arguments: `models` (`[NAME=]PATH`, separated by commas), `replicas`, `cpus` of a replica,
    `hosts` (names that clients may use, separated by commas), and those of `bitwright serve`.
    The API key is BITWRIGHT_API_KEY in the environment of replicas.
    """
    serve = need("ray.serve", "ray")
    known = {"models", "replicas", "cpus", "hosts", *_MODEL, *_LIMITS}
    if unknown := sorted(set(arguments) - known):
        raise BitwrightError(
            f"there is no argument {unknown[0]!r}", expected=", ".join(sorted(known))
        )
    if not arguments.get("models"):
        raise BitwrightError("the argument 'models' is missing", expected="models=PATH,...")
    paths = arguments["models"].split(",")
    options = _converted(arguments, _MODEL)
    limits = _converted(arguments, _LIMITS)
    hosts = tuple(filter(None, arguments.get("hosts", "").split(",")))

    def make() -> Any:
        from bitwright.llm.serve.app import make_app
        from bitwright.llm.serve.models import open_models

        key = os.environ.get("BITWRIGHT_API_KEY") or None
        settings = Settings(api_key=key, hosts=hosts, **limits)
        return make_app(open_models(paths, **options), settings)

    deployment = serve.deployment(
        serve.ingress(make)(),
        name="bitwright",
        num_replicas=int(arguments.get("replicas", 1)),
        max_ongoing_requests=limits.get("max_queue", Settings().max_queue),
        ray_actor_options={"num_cpus": float(arguments.get("cpus", 1))},
    )
    return deployment.bind()


def _converted(arguments: Mapping[str, str], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Arguments in their types; absent ones are left out."""
    try:
        return {name: kind(arguments[name]) for name, kind in kinds.items() if name in arguments}
    except ValueError as error:
        raise BitwrightError(f"an argument is not a number: {error}") from None
