"""Keeps composite layers whole, and their sizes symbolic, while torch traces.

Recurrent layers and 1-D max pooling trace as one op, but torch learns the shape of the result by
unrolling the sequence, or in code that takes plain integers, either of which would fix a size. Of
fake quantization it knows no shape at all. The fused transformer layer is one op that only eager
mode needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensor = torch.Tensor


def _sequence_like(x: Tensor, h: Tensor, bidirectional: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], h.shape[-1] * (2 if bidirectional else 1)))


def _lstm_like(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Tensors of the shapes that `aten.lstm` gives."""
    h, c = hx
    return _sequence_like(x, h, bidirectional), torch.empty_like(h), torch.empty_like(c)


def _rnn_like(
    x: Tensor,
    h: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Tensors of the shapes that `aten.gru` and `aten.rnn_*` give."""
    return _sequence_like(x, h, bidirectional), torch.empty_like(h)


def _max_pool1d(
    x: Tensor,
    kernel: list[int],
    stride: list[int] = (),  # type: ignore[assignment]
    padding: list[int] = (0,),  # type: ignore[assignment]
    dilation: list[int] = (1,),  # type: ignore[assignment]
    ceil: bool = False,
) -> Tensor:
    """The same by pooling over two axes, the first of size 1."""
    strides = [1, *(stride or kernel)]
    rows = x.unsqueeze(-2)
    pooled = torch.ops.aten.max_pool2d(
        rows, [1, *kernel], strides, [0, *padding], [1, *dilation], ceil
    )
    return pooled.squeeze(-2)


def _quantized_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _kernels() -> dict[Any, Any]:
    aten = torch.ops.aten
    return {
        aten.lstm.input: _lstm_like,
        aten.gru.input: _rnn_like,
        aten.rnn_tanh.input: _rnn_like,
        aten.rnn_relu.input: _rnn_like,
        aten.max_pool1d.default: _max_pool1d,
        aten.fake_quantize_per_tensor_affine.default: _quantized_like,
        aten.fake_quantize_per_tensor_affine.tensor_qparams: _quantized_like,
        aten.fake_quantize_per_channel_affine.default: _quantized_like,
    }


@contextmanager
def whole_composites() -> Iterator[None]:
    """Inside, torch traces these layers as described above."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Meta)
    kernels = _kernels()
    table = torch._decomp.decomposition_table  # where fake tensors look for shapes
    before = {op: (dict(op.py_kernels), table.get(op)) for op in kernels}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for op, kernel in kernels.items():
            op.py_kernels.update(dict.fromkeys(keys, kernel))
            table[op] = kernel
            op._dispatch_cache.clear()
        yield
    finally:
        for op, (own, decomposition) in before.items():
            del table[op]
            if decomposition is not None:
                table[op] = decomposition
            op.py_kernels.clear()
            op.py_kernels.update(own)
            op._dispatch_cache.clear()
        torch.backends.mha.set_fastpath_enabled(fast_path)
