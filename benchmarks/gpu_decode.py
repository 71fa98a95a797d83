"""One-token decode of a 1.5 B decoder on a GPU: int8 and 4-bit weights, beside PyTorch in bf16.

    python benchmarks/gpu_decode.py [int8] [int4] [bf16] [--tiny] [--kernels] [--rounds N]

The model has random weights and the sizes of Qwen2.5-1.5B: 28 layers of 1536 features, 12 heads
that share 2 key heads, 8960 gated features, 151,936 words, a cache of 1,024 keys in bf16. A step
reads one token at position 700 and gives the next one. PyTorch runs as one CUDA graph of the
compiled module. `--kernels` prints the steps of one layer. `--tiny` runs small sizes; without a GPU
it needs TRITON_INTERPRET=1 and compares with the reference interpreter instead of timing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import bitwright as bw
from bitwright.ir.graph import Graph, Value

GROUP = 128
"""Terms per scale of 4-bit weights."""


@dataclass(frozen=True)
class Sizes:
    width: int = 1536
    heads: int = 12
    kv_heads: int = 2
    gated: int = 8960
    layers: int = 28
    words: int = 151936
    context: int = 1024
    at: int = 700

    @property
    def features(self) -> int:
        return self.width // self.heads


TINY = Sizes(64, 4, 2, 96, 2, 100, 32, 20)


class Decoder:
    """Builds the graph of one step; caches are states."""

    def __init__(self, sizes: Sizes, bits: int, seed: int = 0) -> None:
        self.sizes, self.bits = sizes, bits
        self.rng = np.random.default_rng(seed)
        self.b = bw.Builder(f"decoder_int{bits}")

    def weight(self, terms: int, columns: int) -> Value:
        """A quantized weight [terms, columns] with a scale per column, or per group of terms."""
        b = self.b
        q = np.frombuffer(self.rng.bytes(terms * columns), np.int8).reshape(terms, columns)
        if self.bits == 8:
            scale = np.full(columns, 0.01 / terms**0.5, np.float32)
            return b.dequantize(b.constant(np.maximum(q, -127)), scale, axis=1)
        narrow = b.constant((q >> 4).astype(ml_dtypes.int4))
        block = min(GROUP, terms)
        scale = np.full((-(-terms // block), columns), 0.2 / terms**0.5, np.float32)
        return b.dequantize(narrow, scale, axis=0, block=block)

    def vector(self, count: int) -> np.ndarray[Any, Any]:
        return self.rng.uniform(0.5, 1.5, count).astype(np.float32)

    def graph(self, has_logits: bool) -> Graph:
        """One step; its result is the next token, and the logits if wanted."""
        b, s = self.b, self.sizes
        token, at = b.input("token", "i64[1, 1]"), b.input("at", "i64[1]")
        table = self.rng.standard_normal((min(s.words, 4096), s.width), np.float32)
        table = np.resize(table.astype(ml_dtypes.bfloat16), (s.words, s.width))
        x = b.cast(b.gather(b.constant(table), token, axis=0), to="f32")
        positions = b.reshape(at, shape=(1, 1))
        angles = np.arange(s.context)[:, None] * 1e6 ** (
            -np.arange(s.features // 2) * 2 / s.features
        )
        tables = [b.constant(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
        lengths = b.add(at, np.array([1]))
        for layer in range(s.layers):
            x = self._layer(x, layer, at, positions, tables, lengths)
        logits = b.matmul(b.rms_norm(x, self.vector(s.width)), self.weight(s.width, s.words))
        found = {"token": b.argmax(logits, axis=-1, keepdims=False)}
        return b.build(**found, **({"logits": logits} if has_logits else {}))

    def _layer(
        self, x: Value, layer: int, at: Value, positions: Value, tables: list[Value], lengths: Value
    ) -> Value:
        b, s, d = self.b, self.sizes, self.sizes.features
        own, shared = s.heads * d, s.kv_heads * d
        qkv = b.matmul(b.rms_norm(x, self.vector(s.width)), self.weight(s.width, own + 2 * shared))
        qkv = b.add(qkv, self.vector(own + 2 * shared))
        parts = b.split(qkv, axis=-1, sizes=(own, shared, shared))
        heads = [b.reshape(p, shape=(1, 1, p.shape[-1] // d, d)) for p in parts]
        q, k, v = (b.transpose(h, perm=(0, 2, 1, 3)) for h in heads)
        q, k = (b.cast(b.rotary(t, *tables, positions), to="bf16") for t in (q, k))
        caches = []
        for name, new in (("k", k), ("v", b.cast(v, to="bf16"))):
            room = np.zeros((1, s.kv_heads, s.context, d), ml_dtypes.bfloat16)
            state = b.state(f"{name}{layer}", room)
            caches.append(b.tensor_scatter(state, new, at, axis=2))
            b.update(state, caches[-1])
        found = b.attention(q, *caches, None, None, None, lengths, causal=True)
        found = b.reshape(b.transpose(found, perm=(0, 2, 1, 3)), shape=(1, 1, own))
        x = b.add(x, b.matmul(b.cast(found, to="f32"), self.weight(own, s.width)))
        y = b.matmul(b.rms_norm(x, self.vector(s.width)), self.weight(s.width, 2 * s.gated))
        gate, up = b.split(y, axis=-1, sizes=(s.gated, s.gated))
        y = b.mul(b.mul(gate, b.sigmoid(gate)), up)
        return b.add(x, b.matmul(y, self.weight(s.gated, s.width)))


def bytes_of(sizes: Sizes, bits: int) -> float:
    """The bytes of one step: weights and scales as stored, and the visible keys and values."""
    s = sizes
    own = s.width + 2 * s.kv_heads * s.features
    layer = s.width * (own + s.width + 3 * s.gated)
    weights = s.layers * layer + s.width * s.words
    scales = weights / GROUP * 4 if bits == 4 else 0.0
    cache = 2 * s.layers * s.kv_heads * (s.at + 1) * s.features * 2
    return weights * bits / 8 + scales + cache


def kernels_of_a_layer(exe: Any, layers: int) -> Counter[str]:
    """Kernel calls per layer, by family."""
    steps = [step for step in exe.engine.artifact.schedule.steps if hasattr(step, "kernel")]
    sources = exe.engine.artifact.sources
    counts = Counter(sources[step.kernel].family for step in steps)
    return Counter({name: round(count / layers, 2) for name, count in counts.items()})  # type: ignore[misc]


def check(graph: Graph, exe: Any, feeds: dict[str, Any]) -> None:
    """The logits of three steps beside those of the reference interpreter."""
    reference = bw.compile(graph, target="reference")
    for place in range(3):
        given = {**feeds, "at": np.array([place])}
        have, want = exe.run(given)["logits"], reference.run(given)["logits"]
        error = np.linalg.norm(have - want) / np.linalg.norm(want)
        print(f"  step {place}: relative error of the logits {error:.1e}")


def time_ours(sizes: Sizes, bits: int, rounds: int, shows: bool) -> float | None:
    import torch

    begin = time.perf_counter()
    graph = Decoder(sizes, bits).graph(not torch.cuda.is_available())
    built = time.perf_counter()
    exe = bw.compile(graph, target="cuda", precision="mixed_bf16")
    for step in exe.engine.fallbacks:  # type: ignore[attr-defined]
        print(f"  on the CPU: {step.op.op}: {step.why}")
    if shows:
        for name, count in kernels_of_a_layer(exe, sizes.layers).items():
            print(f"  {count:6.2f} per layer  {name}")
    feeds: dict[str, Any] = {"token": np.array([[5]]), "at": np.array([sizes.at])}
    if not torch.cuda.is_available():
        check(graph, exe, feeds)
        return None
    on_device = {name: torch.as_tensor(value, device="cuda") for name, value in feeds.items()}
    for _ in range(5):
        exe.run(on_device)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    print(f"  built in {built - begin:.1f} s, ready in {ready - built:.1f} s")
    return median_us(lambda: exe.run(on_device), rounds)


def median_us(call: Callable[[], Any], rounds: int) -> float:
    """The median time of a call on the device, which overwrites its L2 cache before each."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:  # the host runs ahead, as in triton.testing.do_bench
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def time_peer(sizes: Sizes, rounds: int) -> float | None:
    """The same model in PyTorch, compiled, bf16, as one CUDA graph."""
    import torch
    from gpu_decode_peer import Peer

    if not torch.cuda.is_available():
        print("  the peer needs a GPU")
        return None
    model = Peer(sizes).to("cuda", torch.bfloat16).eval()
    given = model.inputs()
    step = torch.compile(model, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            step(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(*given)
        return median_us(graph.replay, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("forms", nargs="*", default=["bf16", "int8", "int4"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    sizes = TINY if given.tiny else Sizes()
    found: dict[str, float] = {}
    for form in sorted(given.forms, key="bf16".__eq__):  # the peer compiles for long: last
        print(form, flush=True)
        if form == "bf16":
            taken = time_peer(sizes, given.rounds)
        else:
            taken = time_ours(sizes, int(form.removeprefix("int")), given.rounds, given.kernels)
        if taken is not None:
            found[form] = taken
            print(f"  {taken:8.1f} us", flush=True)
    for form, taken in found.items():
        if form == "bf16":
            continue
        rate = bytes_of(sizes, int(form.removeprefix("int"))) / taken / 1e6
        ratio = f", {found['bf16'] / taken:.2f}x the peer in bf16" if "bf16" in found else ""
        print(f"{form}: {taken:.1f} us, {rate:.2f} TB/s{ratio}", flush=True)


if __name__ == "__main__":
    main()
