"""Keeps composite layers as one op, with symbolic sizes, while torch traces.

Torch infers the result shapes of recurrent layers by unrolling the sequence, and those of 1-D max
pooling in code that takes plain integers; both would specialize a size. For fake quantization it
has no shape function. The fused transformer layer is an op for eager mode only and is disabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Tensor = torch.Tensor


def _recurrent_like(x: Tensor, hx: Any, params: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Tensors with the result shapes of `aten.lstm`, `aten.gru` and `aten.rnn_*`."""
    states = [hx] if isinstance(hx, Tensor) else hx
    *_, bidirectional, _batch_first = options
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return x.new_empty((*x.shape[:-1], width)), *map(torch.empty_like, states)


def _max_pool1d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Tensor:
    """1-D max pooling as 2-D max pooling with a first axis of size 1."""
    strides = [1, *(stride or kernel)]
    rows = x.unsqueeze(-2)
    pooled: Tensor = torch.ops.aten.max_pool2d(
        rows, [1, *kernel], strides, [0, *padding], [1, *dilation], ceil
    )
    return pooled.squeeze(-2)


def _quantized_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _kernels() -> dict[Any, Any]:
    aten = torch.ops.aten
    return {
        aten.lstm.input: _recurrent_like,
        aten.gru.input: _recurrent_like,
        aten.rnn_tanh.input: _recurrent_like,
        aten.rnn_relu.input: _recurrent_like,
        aten.max_pool1d.default: _max_pool1d,
        aten.fake_quantize_per_tensor_affine.default: _quantized_like,
        aten.fake_quantize_per_tensor_affine.tensor_qparams: _quantized_like,
        aten.fake_quantize_per_channel_affine.default: _quantized_like,
    }


@contextmanager
def whole_composites() -> Iterator[None]:
    """Trace these layers as described above."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Meta)
    kernels = _kernels()
    table = torch._decomp.decomposition_table  # the shape functions of fake tensors
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
