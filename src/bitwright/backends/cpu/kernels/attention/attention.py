"""Attention as one kernel: softmax(cap(scale · q kᵀ) + bias) v, scores never leave the cache.

A block of queries is held transposed, features by queries, so that lanes run along queries:

    scores   s[key][query] += k[key][d] · q[d][query]      k is broadcast from where it lies
    softmax  running maximum and sum per query, lane by lane; no horizontal step
    values   o[query][:]   += p[key][query] · v[key][:]    lanes along the features of v

Keys go by in blocks. When a block raises the maximum, sums and results so far shrink by
e^(old - new). Causal attention, windows and lengths limit the range of keys; only tiles on the edge
of that range compare positions. Few queries (decoding) go another way, with lanes along features
and keys: `kernels.attention.single_query`. Where instructions multiply bf16, both products take them
(`kernels.attention.bf16`).

Work is cut into (batch, head, block of queries); every result is computed by one thread in a fixed
order.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Module, Signature
from bitwright.backends.cpu.kernels.attention.bf16 import block_kind
from bitwright.backends.cpu.kernels.attention.query_block import emit_query_blocks
from bitwright.backends.cpu.kernels.attention.single_query import emit_single_query
from bitwright.backends.cpu.kernels.attention.spec import (
    QUERY_BLOCK,
    SINGLE_QUERY,
    Attention,
    max_single_queries,
)


def emit_attention(module: Module, name: str, kernel: Attention) -> Signature:
    with module.kernel(name, kernel.signature) as f, f.subnormals_as_zeros():
        if kernel.paths == SINGLE_QUERY:
            emit_single_query(f, kernel)
        elif kernel.paths == QUERY_BLOCK:
            emit_query_blocks(f, kernel, block_kind(kernel))
        else:
            few = f.le(f.args.size("queries"), max_single_queries(f.target, kernel.element))
            with f.if_(few) as branch:
                emit_single_query(f, kernel)
            with branch.else_():
                emit_query_blocks(f, kernel, block_kind(kernel))
    return kernel.signature
