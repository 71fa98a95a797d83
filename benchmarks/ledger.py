"""The error ledger against true leave-one-out, on models with data.

    python benchmarks/ledger.py --tasks FOLDER mobilenetv2 --samples 2000 --batches 800
    python benchmarks/ledger.py --tasks FOLDER ppocr --samples 300 --batches 100 --held

Truth: for each layer, the quantized model is compiled with that layer in float, and the energy that
its output error loses is measured. Restoring a layer also changes how every later layer rounds,
and what that adds or removes by chance has nothing to do with the layer. It averages out over many
samples: after the evaluation batches come repetitions of them whose float inputs are moved by less
than half a step of an 8-bit image (and mirrored in every second repetition, with `--mirror`). The
split-half correlation of the truth says how much chance is left, and gives an estimate
(Spearman-Brown) of the correlation that a perfect prediction would reach.

`--held` measures leave-one-out with the rounding of all other layers held fixed: the float model
with the measured local errors of all layers but one. It has no chance of rounding; its ranking
depends only on the data, so it uses the batches of the ledger.

Energies of the truth are kept in `--cache FOLDER`, one file per layer, and computed once.

FOLDER contains `tasks.py` with `load(name)`, whose result has `model`, `calibration` and
`evaluation` (batches).
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

import numpy as np

import bitwright as bw
from bitwright.ir.dtype import f32
from bitwright.ir.edit import prune
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.tuning.attribution import compiled, run
from bitwright.tuning.float_layers import restore_layers
from bitwright.tuning.instrumented import copied, reaching
from bitwright.tuning.local_errors import LocalErrors
from bitwright.tuning.matching import Matching

NOTABLE = 0.01
DITHER = 1 / 255
"""Half a step of an image with values from -1 to 1."""
KEEP = "keep."


def ranks(numbers):
    return np.argsort(np.argsort(numbers)).astype(float)


def spearman(a, b):
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1]) if len(a) > 2 else float("nan")


def split_half(effects):
    """Mean rank correlation of the truth on two halves of the samples."""
    found = []
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(len(effects))
        half = len(order) // 2
        found.append(spearman(effects[order[:half]].sum(0), effects[order[half:]].sum(0)))
    return float(np.mean(found))


def bound(half):
    """The expected correlation of a perfect prediction with the truth."""
    return float(np.sqrt(max(0.0, 2 * half / (1 + half))))


def samples(batches, count, mirror):
    """The batches, then repetitions with dithered inputs."""
    for number in range(count):
        batch = batches[number % len(batches)]
        draw, repetition = np.random.default_rng(number), number // len(batches)
        found = {}
        for name, array in batch.items():
            if array.dtype.kind == "f":
                if mirror and array.ndim == 4 and repetition % 2:
                    array = array[..., ::-1]
                if repetition:
                    array = array + draw.uniform(-DITHER, DITHER, array.shape).astype("f")
            found[name] = np.ascontiguousarray(array)
        yield found


def true_effects(quantized, layers, data, threads, cache):
    """The error energy that each layer's restoration removes, [samples, layers], and its sum."""
    matching = Matching(quantized.source, quantized.graph)
    held, exact = [], compiled(quantized.source, threads)
    columns = []
    for number, layer in enumerate([None, *layers]):
        path = cache / f"{number}.npy" if cache else None
        if path is not None and path.exists() and len(np.load(path)) >= len(data):
            columns.append(np.load(path)[: len(data)].reshape(len(data), -1)[:, 0])
            continue
        held = held or [{n: np.array(a) for n, a in run(exact, batch).items()} for batch in data]
        graph = quantized.graph
        if layer is not None:
            graph = restore_layers(matching, [layer], quantized.equalized)
        exe = compiled(graph, threads)
        pairs = zip(held, (run(exe, batch) for batch in data), strict=True)
        columns.append(np.array([energy(a, b) for a, b in pairs]))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, columns[-1])
    before, *without = columns
    return before[:, None] - np.array(without).T, before.sum()


def energy(exact, found):
    """The energy of the error; the models here have one float output."""
    errors = (found[n].astype(np.float64) - a for n, a in exact.items() if a.dtype.kind == "f")
    return sum(float(np.vdot(e, e)) for e in errors)


def held_graph(matching, shares, layers):
    """The float graph with the local errors of layers, each times an input."""
    source, quantized = matching.float_graph, matching.quantized
    b = Builder.of(quantized.with_(updates=()))
    b.outputs = {}
    factors = {layer: b.input(KEEP + layer, "f32[]") for layer in layers}
    here = {value: value for node in quantized.nodes for value in node.outputs}
    errors, sites, new = LocalErrors(b, matching, here, shares, {}), {}, {}
    used = reaching(source)
    for site in matching.sites:
        if site.value in used:
            (error,) = errors.causes(site, split=False).values()
            sites[site.value] = b.mul(factors[site.layer], error)
    for node in source.nodes:
        new.update(zip(node.outputs, copied(b, node, new, quantized).outputs, strict=True))
        for value in node.outputs:
            if value in sites:
                moved = sites[value]
                new[value] = b.add(
                    new[value], moved if value.dtype == f32 else b.cast(moved, to=value.dtype)
                )
    for name, value in source.outputs:
        b.output(f"held {name}", new[value])
    return verify(prune(b.build()))


def held_effects(quantized, layers, data, threads, cache):
    """As `true_effects`, with the local errors of the other layers held fixed."""
    path = cache / "held.npy" if cache else None
    if path is not None and path.exists() and len(np.load(path)) >= len(data):
        found = np.load(path)[: len(data)]
        return found[:, :1] - found[:, 1:], found[:, 0].sum()
    matching = Matching(quantized.source, quantized.graph)
    exe = compiled(held_graph(matching, quantized.equalized, layers), threads)
    exact, rows = compiled(quantized.source, threads), []
    for batch in data:
        outputs = {n: np.array(a) for n, a in run(exact, batch).items()}
        row = []
        for left in (None, *layers):
            factors = {KEEP + layer: np.float32(layer != left) for layer in layers}
            found = run(exe, {**batch, **factors})
            row.append(energy(outputs, {n: found[f"held {n}"] for n in outputs}))
        rows.append(row)
    found = np.array(rows)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, found)
    return found[:, :1] - found[:, 1:], found[:, 0].sum()


def compare(what, predicted, shares, effects, error):
    truth, half = effects.sum(0), split_half(effects)
    notable = truth > NOTABLE * error
    print(
        f"  {what}, {len(effects)} samples: spearman of leave-one-out "
        f"{spearman(predicted, truth):.3f}, of shares {spearman(shares, truth):.3f}; "
        f"{notable.sum()} notable layers {spearman(predicted[notable], truth[notable]):.3f}; "
        f"pearson {np.corrcoef(predicted, truth)[0, 1]:.3f}; truth split in halves {half:.3f}, "
        f"bound {bound(half):.3f}",
        flush=True,
    )


def measure(name, task, given):
    threads = given.threads
    quantized = bw.quantize(task.model, task.calibration, threads=threads, progress=False)
    data = list(samples(task.evaluation, max(given.samples, given.batches), given.mirror))
    begin = time.perf_counter()
    ledger = bw.ledger(quantized, data[: given.batches], fixes=0, threads=threads)
    seconds = time.perf_counter() - begin
    layers = list(ledger.layers)
    shares, predicted = np.array([ledger.layers[layer] for layer in layers]).T
    print(
        f"{name}: {len(layers)} layers, ledger on {ledger.batches} batches {seconds:.0f} s, "
        f"{ledger.sqnr_db:.1f} dB, rest {ledger.rest / ledger.error_energy:+.2%}",
        flush=True,
    )
    cache = given.cache / name if given.cache else None
    if given.samples:
        found = true_effects(quantized, layers, data[: given.samples], threads, cache)
        compare("truth", predicted, shares, *found)
    if given.held:
        found = held_effects(quantized, layers, data[: given.batches], threads, cache)
        compare("truth with other layers held", predicted, shares, *found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--tasks", required=True, help="folder with tasks.py")
    parser.add_argument("--batches", type=int, default=64, help="of the ledger")
    parser.add_argument("--samples", type=int, default=300, help="of the truth; 0: none")
    parser.add_argument("--mirror", action="store_true", help="mirror every second repetition")
    parser.add_argument("--held", action="store_true", help="hold the other layers' rounding too")
    parser.add_argument("--cache", type=Path, help="folder of the truth")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    sys.path.insert(0, given.tasks)
    tasks = importlib.import_module("tasks")
    for name in given.names:
        measure(name, tasks.load(name), given)


if __name__ == "__main__":
    main()
