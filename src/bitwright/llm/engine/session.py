"""A session: one sequence of tokens that grows, is cut back, copied and saved."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError, RunError
from bitwright.llm.engine.decoder import Array
from bitwright.llm.engine.engine import Engine, Sequence

_FORMAT = "bitwright session 1"


class Session:
    """`run(tokens)` appends tokens and returns the logits behind the last of them.

    Sessions of one model share its slots; a session that finds none free moves an idle one out.
    """

    def __init__(self, engine: Engine, fingerprint: str, sequence: Sequence | None = None) -> None:
        self._engine, self._fingerprint = engine, fingerprint
        self._sequence = Sequence() if sequence is None else sequence

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return list(self._sequence.tokens)

    def __len__(self) -> int:
        return len(self._sequence.tokens)

    def run(self, tokens: Tokens[int] | Array, all_logits: bool = False) -> Array:
        """Append tokens: logits[vocabulary] of the last one, or [len(tokens), vocabulary] of all.

        If it raises, the session is as before.
        """
        engine = self._engine
        if type(tokens) is not list or len(tokens) != 1 or type(tokens[0]) is not int:
            tokens = _checked(tokens)
        size = engine.decoder.vocabulary
        if min(tokens) < 0 or max(tokens) >= size:
            wrong = next(t for t in tokens if not 0 <= t < size)
            raise RunError(f"token {wrong} is not in the vocabulary", expected=f"0 to {size - 1}")
        logits = engine.extend(self._sequence, tokens, all_logits)
        return logits if all_logits else logits[-1]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._engine.truncate(self._sequence, length)

    def clone(self) -> Session:
        """A session with the same tokens that goes on by itself."""
        return Session(self._engine, self._fingerprint, self._engine.clone(self._sequence))

    def close(self) -> None:
        """Give the slot back; a new session with the same beginning may start from it."""
        self._engine.release(self._sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, path: str | Path) -> None:
        """Write tokens and cache to a file, for `LanguageModel.load_session`."""
        with self._engine.lock:
            arrays = self._engine.read(self._sequence)
            tokens = list(self._sequence.tokens)
        elements = {name: array.dtype.name for name, array in arrays.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        facts = {
            "format": _FORMAT,
            "model": self._fingerprint,
            "elements": elements,
            "shapes": shapes,
        }
        raw = {
            f"state/{name}": np.frombuffer(array.tobytes(), np.uint8)
            for name, array in arrays.items()
        }
        with open(path, "wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
                tokens=np.array(tokens, np.int32),
                **raw,
            )


def weight_samples(model: Any) -> list[object]:
    """Some bytes of every tensor of a loaded model, which tell apart models of one shape."""
    source = getattr(model, "source", None)
    if source is None:
        return []
    found: list[object] = []
    for name, tensor in sorted(source.tensors.items()):
        values = tensor.data.reshape(-1)
        middle = len(values) // 2
        sample = values[:16].tobytes() + values[middle : middle + 16].tobytes()
        found.append((name, tensor.format, sample))
    return found


def load_session(engine: Engine, fingerprint: str, path: str | Path) -> Session:
    """The session that `Session.save` wrote; it must belong to this model."""
    where = str(path)
    try:
        data = Path(path).read_bytes()
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            facts = json.loads(bytes(file["facts"]))
            tokens = [int(token) for token in file["tokens"]]
            if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
                raise ImportModelError("the file is no saved session", where=where)
            if facts.get("model") != fingerprint:
                raise ImportModelError(
                    "the session belongs to another model, or to another cache format", where=where
                )
            arrays = _states(engine, file, len(tokens))
    except ImportModelError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds
        raise ImportModelError(f"the session cannot be read: {error}", where=where) from None
    engine.check_room(0, len(tokens))
    return Session(engine, fingerprint, Sequence(tokens, None, arrays))


def _states(engine: Engine, file: Any, length: int) -> dict[str, Array]:
    """The saved cache, shaped as the model expects it."""
    arrays = {}
    for name, array in engine.decoder.read(0, 0).items():
        shape = (array.shape[0], length, *array.shape[2:])
        raw = np.array(file[f"state/{name}"])  # own, aligned memory
        arrays[name] = raw.view(array.dtype).reshape(shape)
    return arrays


def _checked(tokens: Any) -> list[int]:
    """Tokens as a list of Python integers."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise RunError(
            "tokens are a list of at least one integer",
            found="an empty list" if array.ndim == 1 and not array.size else repr(tokens)[:80],
        )
    checked: list[int] = array.tolist()
    return checked
