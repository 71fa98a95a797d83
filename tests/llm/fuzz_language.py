"""Feeds damaged GGUF files and Hugging Face folders to `load_model`.

    python tests/llm/fuzz_language.py --count 20000

Every case must give a model or a BitwrightError within seconds and 2 GB. A case depends only on
`--seed` and its number; `--only N` runs one and shows its traceback.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import save_decoder

from bitwright.errors import BitwrightError
from bitwright.frontend.language.source import read_source
from bitwright.llm.files.save import save_model
from bitwright.llm.model import load_model

MEMORY, SECONDS = 2 << 30, 5.0
ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 3, 1 << 40, 1.5, float("nan"), "x", [], {}, [[]], True, "../x",
)  # fmt: skip


def damaged_bytes(data: bytes, random: Random, span: int) -> bytes:
    """Some bytes of the first `span` changed, removed or doubled."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(min(span, len(found)))
        kind = random.randrange(4)
        if kind == 0:
            found[at] = random.randrange(256)
        elif kind == 1:
            found[at : at + 8] = random.choice(
                (b"\xff" * 8, b"\0" * 8, (1 << 40).to_bytes(8, "little"))
            )
        elif kind == 2:
            del found[at : at + random.randrange(1, 64)]
        else:
            del found[random.randrange(len(found)) :]
        if not found:
            break
    return bytes(found)


def damaged_json(data: dict[str, Any], random: Random) -> dict[str, Any]:
    found = dict(data)
    for _ in range(random.choice((1, 2))):
        found[random.choice(sorted(found))] = random.choice(ODD)
    return found


def write_case(kind: int, seeds: Path, folder: Path, random: Random) -> Path:
    if kind == 0:
        data = (seeds / "model.gguf").read_bytes()
        path = folder / "model.gguf"
        path.write_bytes(damaged_bytes(data, random, data.index(b"blk.1.ffn_up") + 200))
        return path
    path = folder / "hf"
    shutil.copytree(seeds / "hf", path)
    if kind == 1:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(damaged_json(config, random)))
    else:
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(damaged_bytes(data, random, 2000))
    return path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        seeds = Path(name)
        save_decoder("gemma3", seeds / "hf")
        save_decoder("qwen2", seeds / "other")
        save_model(read_source(seeds / "other"), seeds / "model.gguf")
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        numbers = range(options.count) if options.only is None else [options.only]
        for number in numbers:
            folder = seeds / "case"
            folder.mkdir()
            path = write_case(number % 3, seeds, folder, Random(f"{options.seed}/{number}"))
            begin = time.process_time()
            try:
                load_model(path).graph_for()
                result = "loaded"
            except BitwrightError:
                result = "refused"
            except Exception as error:
                result = "failed"
                print(number, type(error).__name__, error)
                if options.only is not None:
                    raise
            if time.process_time() - begin > SECONDS:
                result = "slow"
                print(number, "slow")
            results[result] += 1
            shutil.rmtree(folder)
    print(dict(results))
    return int(bool(results["failed"] or results["slow"]))


if __name__ == "__main__":
    raise SystemExit(main())
