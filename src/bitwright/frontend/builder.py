"""The builder of graphs with static types: an op is one value, unless it is declared here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder, Operand


class TypedBuilder(Builder):
    """`Builder` with declared types: it finds ops by name at run time, which hides their types."""

    adam_update: Callable[..., tuple[Value, ...]]
    attention_backward: Callable[..., tuple[Value, ...]]
    batch_norm_backward: Callable[..., tuple[Value, ...]]
    batch_norm_train: Callable[..., tuple[Value, ...]]
    channel_moments: Callable[..., tuple[Value, ...]]
    channel_sums: Callable[..., tuple[Value, ...]]
    dynamic_quantize: Callable[..., tuple[Value, Value, Value]]
    gated_delta: Callable[..., tuple[Value, Value]]
    group_norm_backward: Callable[..., tuple[Value, ...]]
    gru: Callable[..., tuple[Value, Value]]
    gru_backward: Callable[..., tuple[Value, ...]]
    gru_train: Callable[..., tuple[Value, ...]]
    integer_gru: Callable[..., tuple[Value, Value]]
    integer_lstm: Callable[..., tuple[Value, Value, Value]]
    integer_rnn: Callable[..., tuple[Value, Value]]
    kv_write: Callable[..., tuple[Value, ...]]
    layer_norm_backward: Callable[..., tuple[Value, ...]]
    lion_update: Callable[..., tuple[Value, ...]]
    lstm: Callable[..., tuple[Value, Value, Value]]
    lstm_backward: Callable[..., tuple[Value, ...]]
    lstm_train: Callable[..., tuple[Value, ...]]
    max_pool_indices: Callable[..., tuple[Value, Value]]
    rms_norm_backward: Callable[..., tuple[Value, ...]]
    rnn: Callable[..., tuple[Value, Value]]
    rnn_backward: Callable[..., tuple[Value, ...]]
    selective_scan: Callable[..., tuple[Value, Value]]
    sgd_update: Callable[..., tuple[Value, ...]]
    split: Callable[..., tuple[Value, ...]]
    top_k: Callable[..., tuple[Value, Value]]
    unique: Callable[..., tuple[Value, Value, Value, Value]]

    def op(
        self,
        op: str,
        *operands: Operand,
        name: str | None = None,
        outputs: Iterable[str] | None = None,
        **attrs: Any,
    ) -> Value:
        """Append a node; `op` must have one result."""
        value: Value = super().op(op, *operands, name=name, outputs=outputs, **attrs)
        return value

    def results(self, op: str, *operands: Operand, **attrs: Any) -> tuple[Value, ...]:
        """Append a node with any number of results."""
        return self.node(op, operands, attrs, []).outputs

    def __getattr__(self, name: str) -> Callable[..., Value]:
        method: Callable[..., Value] = super().__getattr__(name)
        return method
