"""Fused attention: softmax(cap(scale · q kᵀ) + bias) v with online softmax; scores stay in cache.

A block of queries is stored transposed, features by queries, so lanes run along queries:

    scores   s[key][query] += k[key][d] · q[d][query]      k is broadcast from memory
    softmax  running maximum and sum per query, lane by lane, without horizontal operations
    values   o[query][:]   += p[key][query] · v[key][:]    lanes along the features of v

Keys are processed in blocks. When a block raises the maximum, the running sums and results are
multiplied by e^(old - new). Causal attention, windows and lengths limit the range of keys; only
tiles at the edge of that range compare positions. A few queries (decoding) are processed one by
one, with lanes along features and keys (`kernels.attention.single_query`). Targets with bf16
products use them for both matrix products (`kernels.attention.bf16`).

A work item is (batch, head, block of queries); one thread computes each result in a fixed order.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Module, Signature
from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.attention.bf16 import block_kind
from bitwright.backends.cpu.kernels.attention.query_block import emit_query_blocks
from bitwright.backends.cpu.kernels.attention.single_query import emit_single_query


def emit_attention(module: Module, name: str, kernel: spec.Attention) -> Signature:
    with module.kernel(name, kernel.signature) as f, f.subnormals_as_zeros():
        if kernel.paths == spec.SINGLE_QUERY:
            emit_single_query(f, kernel)
        elif kernel.paths == spec.QUERY_BLOCK:
            emit_query_blocks(f, kernel, block_kind(kernel))
        else:
            few = f.le(f.args.size("queries"), spec.max_single_queries(f.target, kernel.element))
            with f.if_(few) as branch:
                emit_single_query(f, kernel)
            with branch.else_():
                emit_query_blocks(f, kernel, block_kind(kernel))
    return kernel.signature
