"""The error ledger against true leave-one-out, on models with data.

    python benchmarks/ledger.py --tasks FOLDER mobilenetv2 minilm ppocr --batches 100

For each layer, the quantized model is compiled with that layer in float, and its output error is
measured: the truth that the ledger predicts. Prints the rank correlation (Spearman) of both, over
all layers and over those that hold more than 1% of the error, and the rest that the ledger does not
explain. Restoring a layer also changes how every later layer rounds, so the truth has noise of its
own: its split-half correlation shows how much, and bounds what any prediction can reach.

FOLDER contains `tasks.py` with `load(name)`, whose result has `model`, `calibration` and
`evaluation` (batches).
"""

import argparse
import importlib
import sys
import time

import numpy as np

import bitwright as bw
from bitwright.tuning.attribution import Reference, compiled, run
from bitwright.tuning.float_layers import restore_layers
from bitwright.tuning.matching import Matching

NOTABLE = 0.01


def ranks(numbers):
    return np.argsort(np.argsort(numbers)).astype(float)


def spearman(a, b):
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1]) if len(a) > 2 else float("nan")


def split_half(effects):
    """Mean rank correlation of the truth on two halves of the batches."""
    found = []
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(effects))
        half = len(order) // 2
        found.append(spearman(effects[order[:half]].sum(0), effects[order[half:]].sum(0)))
    return float(np.mean(found))


def with_mirrored(batches, count):
    """The batches, and if these are too few, mirrored images too."""
    found = list(batches)
    if len(found) < count:
        found += [
            {n: np.ascontiguousarray(a[..., ::-1]) if a.ndim == 4 else a for n, a in b.items()}
            for b in batches
        ]
    return found[:: max(1, len(found) // count)][:count]


def true_effects(quantized, layers, reference, threads):
    """The error that each layer's restoration removes, [batches, layers]."""
    matching = Matching(quantized.source, quantized.graph)

    def errors(graph):
        exe = compiled(graph, threads)
        return [reference.energy_of(exact, run(exe, batch)) for batch, exact in reference]

    before = np.array(errors(quantized.graph))
    variants = (restore_layers(matching, [layer], quantized.equalized) for layer in layers)
    return before[:, None] - np.array([errors(graph) for graph in variants]).T


def measure(name, task, count, threads):
    quantized = bw.quantize(task.model, task.calibration, threads=threads, progress=False)
    batches = with_mirrored(task.evaluation, count)
    begin = time.perf_counter()
    ledger = bw.ledger(quantized, batches, fixes=0, threads=threads)
    middle = time.perf_counter()
    layers = list(ledger.layers)
    reference = Reference(quantized.source, batches, threads)
    effects = true_effects(quantized, layers, reference, threads)
    end = time.perf_counter()
    truth = effects.sum(0)
    predicted = np.array([ledger.layers[layer][1] for layer in layers])
    shares = np.array([ledger.layers[layer][0] for layer in layers])
    notable = truth > NOTABLE * ledger.error_energy
    half = split_half(effects)
    bound = np.sqrt(max(0.0, 2 * half / (1 + half)))
    print(
        f"{name}: {len(layers)} layers, {len(batches)} batches, {ledger.sqnr_db:.1f} dB, "
        f"rest {ledger.rest / ledger.error_energy:+.2%}\n"
        f"  spearman of leave-one-out {spearman(predicted, truth):.3f}, of shares "
        f"{spearman(shares, truth):.3f}; {notable.sum()} notable layers "
        f"{spearman(predicted[notable], truth[notable]):.3f}\n"
        f"  pearson {np.corrcoef(predicted, truth)[0, 1]:.3f}; truth split in halves {half:.3f}, "
        f"bound {bound:.3f}\n"
        f"  ledger {middle - begin:.0f} s, truth {end - middle:.0f} s",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--tasks", required=True, help="folder with tasks.py")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, options.tasks)
    tasks = importlib.import_module("tasks")
    for name in options.names:
        measure(name, tasks.load(name), options.batches, options.threads)


if __name__ == "__main__":
    main()
