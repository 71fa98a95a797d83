"""Runs a user-defined score on a model before and after a change.

    def accuracy(model):                    # in evaluate.py, given as "evaluate.py:accuracy"
        return (model({"x": images})["logits"].argmax(1) == labels).mean()

The function gets a callable from a dict of arrays to a dict of arrays, and returns a number or a
dict of numbers.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError

Model = Callable[[Mapping[str, Any]], dict[str, Any]]
DEFAULT_NAME = "score"


class Evaluation:
    """The user's function, given as "path.py:function"."""

    def __init__(self, source: str) -> None:
        path, separator, self.name = source.rpartition(":")
        if not separator or not path or not self.name:
            raise BitwrightError(
                f"{source!r} does not name a function", expected="path/to/script.py:function"
            )
        self.path = Path(path)
        if not self.path.is_file():
            raise BitwrightError(f"there is no script {self.path}")
        module = self._module()
        function = getattr(module, self.name, None)
        if not callable(function):
            defined = [
                name
                for name, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module.__name__
            ]
            raise BitwrightError(
                f"{self.path} has no function {self.name!r}",
                expected=", ".join(defined) or "at least one function in it",
            )
        self.function = function

    def _module(self) -> Any:
        name = f"bitwright_evaluation_{self.path.stem}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        if spec is None or spec.loader is None:
            raise BitwrightError(f"{self.path} is not a Python script", expected="a .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up annotations here
        with self._running("cannot be imported"):
            spec.loader.exec_module(module)
        return module

    def scores(self, model: Model) -> dict[str, float]:
        """The scores of a model by name."""
        with self._running(f"failed in {self.name!r}"):
            found = self.function(model)
        named = found if isinstance(found, Mapping) else {DEFAULT_NAME: found}
        return {str(name): self._number(str(name), value) for name, value in named.items()}

    def _number(self, name: str, value: Any) -> float:
        """A Python number, or an array or tensor of one element."""
        try:
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                return float(array.reshape(()))
        except (TypeError, ValueError):
            pass
        raise BitwrightError(
            f"{self.name!r} of {self.path} returned no number for {name!r}",
            expected="a number, or a dict of numbers",
            found=type(value).__name__,
        )

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Makes modules in the script's folder importable; errors have the line in the script."""
        folder = str(self.path.resolve().parent)
        sys.path.insert(0, folder)
        try:
            yield
        except BitwrightError:
            raise
        except Exception as error:
            lines = [f for f in traceback.extract_tb(error.__traceback__) if _is_in(f, self.path)]
            line = lines[-1].lineno if lines else getattr(error, "lineno", None)
            raise BitwrightError(
                f"the script {what}: {type(error).__name__}: {error}",
                where=f"{self.path}, line {line}" if line else str(self.path),
            ) from error
        finally:
            sys.path.remove(folder)


def _is_in(frame: traceback.FrameSummary, path: Path) -> bool:
    return Path(frame.filename).resolve() == path.resolve()
