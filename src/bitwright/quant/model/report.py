"""The report of a quantization: the scheme of each layer, the reason, and the error."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from bitwright import aliases
from bitwright.ir.container import write_atomically
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.ops.sequence.recurrent import GATES
from bitwright.quant.model.assign import UNREACHED, Choice
from bitwright.quant.model.attention import SCHEME
from bitwright.quant.model.embeddings import Lookup
from bitwright.quant.model.layer_details import LayerDetail, product_detail
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.products import weight_key
from bitwright.quant.model.recipe import INT8_SCHEMES
from bitwright.quant.model.weights.nearest import decibels
from bitwright.quant.model.weights.weights import QuantizedWeights

if TYPE_CHECKING:
    from bitwright.quant.model.stages import QuantizationState

HEADER = ("layer", "op", "scheme", "SQNR dB", "multiply-adds", "why")
ALREADY_QUANTIZED = "already_quantized"
"""The scheme of layers that the input model had quantized."""


@dataclass(frozen=True)
class Layer:
    """One row of the report."""

    name: str
    """A readable name (`quant.model.layer_names`)."""
    op: str
    scheme: str
    reason: str
    sqnr_db: float | None
    """Measured at the layer's result on calibration rows; None for layers in float."""
    multiply_adds: int
    smoothing: float = 0.0
    clip_ratio: float = 1.0
    value: str = ""
    """The path of its result in the graph, which comparisons of models use."""
    weight: str | None = None
    """The name of its weight in the model."""


@dataclass(repr=False)
class QuantizationReport:
    """What `bw.quantize` did: a row per layer, output errors, sizes and notes."""

    recipe: str
    layers: list[Layer]
    output_sqnr_db: dict[str, float]
    """Against the float model, on held-out batches, or on calibration batches if those were too
    few to hold any out."""
    float_bytes: int
    quantized_bytes: int
    held_out_batches: int = 0
    """Batches that only the outputs were measured on."""
    weights_rounded: int = 0
    """Weights and tables in 8 bits or fewer; one that several layers read counts once."""
    seconds: float = field(default=0.0)
    notes: list[str] = field(default_factory=list)
    """Caveats about the numbers."""
    is_measured: bool = True
    """Whether errors were measured on data; if not, the SQNR of a layer is that of its weights."""
    details: dict[str, LayerDetail] = field(default_factory=dict)
    """Histograms and ranges by `Layer.value`, for `bw.write_report`; not part of the JSON form."""

    @property
    def int8_mac_fraction(self) -> float:
        """The fraction of multiply-adds with two 8-bit operands."""
        total = sum(layer.multiply_adds for layer in self.layers)
        schemes = (*INT8_SCHEMES, ALREADY_QUANTIZED)
        int8 = sum(layer.multiply_adds for layer in self.layers if layer.scheme in schemes)
        return int8 / total if total else 0.0

    def __getattr__(self, name: str) -> Any:
        """Properties under the names of the last release."""
        if name not in aliases.REPORT:
            raise AttributeError(f"a report has no attribute {name!r}")
        return getattr(self, aliases.current(aliases.REPORT, name, "report property"))

    def already_quantized(self) -> list[str]:
        """A note if layers of the input model were already quantized."""
        count = sum(layer.scheme == ALREADY_QUANTIZED for layer in self.layers)
        if not count:
            return []
        return [
            f"{count} of {len(self.layers)} layers are already quantized and stay unchanged: "
            "quantize the float model to have them chosen and measured"
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as a dict of plain values."""
        plain = asdict(replace(self, details={}))
        del plain["details"]
        return {**plain, "int8_mac_fraction": self.int8_mac_fraction}

    def save(self, path: Any) -> None:
        text = json.dumps(self.to_json(), indent=2).encode()

        def write(file: IO[bytes]) -> None:
            file.write(text)

        write_atomically(path, write)

    def summary(self) -> str:
        """Int8 fraction, sizes and output errors in one line."""
        outputs = ", ".join(f"{n} {v:.1f} dB" for n, v in self.output_sqnr_db.items())
        ratio = self.quantized_bytes / max(1, self.float_bytes)
        count = self.held_out_batches
        data = f"{count} held-out batch{'es' * (count != 1)}" if count else "calibration data"
        measured = f"outputs on {data}: {outputs or 'none are real numbers'}"
        return (
            f"{self.int8_mac_fraction:.1%} of the multiply-adds in 8 bits; weights "
            f"{self.float_bytes / 1e6:.2f} MB -> {self.quantized_bytes / 1e6:.2f} MB "
            f"({ratio:.2f}); {measured if self.is_measured else 'outputs not measured'}"
        )

    def __repr__(self) -> str:
        return f"<report of {len(self.layers)} layers, recipe {self.recipe}: {self.summary()}>"

    def _repr_html_(self) -> str:
        from bitwright.ir.html import table

        rows = (self._cells(layer) for layer in self.layers)
        notes = [self.summary(), *(f"note: {note}" for note in self.notes)]
        return table(f"quantized with recipe {self.recipe}", HEADER, rows, notes)

    @staticmethod
    def _cells(layer: Layer) -> tuple[str, ...]:
        sqnr = "" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}"
        why = layer.reason + (f"; smoothed {layer.smoothing:g}" if layer.smoothing else "")
        return layer.name, layer.op, layer.scheme, sqnr, f"{layer.multiply_adds:,}", why

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER)
        for layer in self.layers:
            table.add_row(*self._cells(layer))
        text = io.StringIO()
        console = Console(file=text, width=160)
        notes = [f"note: {note}" for note in self.notes]
        console.print(table, self.summary(), *notes, sep="\n", highlight=False, markup=False)
        return text.getvalue()


def make_report(state: QuantizationState) -> QuantizationReport:
    """The report: one row for each product, lookup and attention op of the float graph."""
    graph, weights, names, attentions = state.graph, state.weights, state.names, state.attentions
    chosen = {p.node: choice for choice in state.choices for p in choice.point.products}
    tables = {one.node: one for one in state.lookups}
    layers = []
    for path, owner, node, is_in_loop in _with_paths(graph, ""):
        count = state.work.macs(node)
        layer = None
        if node in chosen:
            choice = chosen[node]
            if choice.reason == UNREACHED:
                count = 0  # the batch that work is counted on does not reach it
            layer = _product_layer(path, node, choice, weights.get(path), count)
        elif node in tables:
            layer = _lookup_layer(tables[node], chosen, weights, names)
        elif node.name in attentions.reasons and owner is graph:
            scheme = SCHEME if node.name in attentions.chosen else "float"
            layer = Layer(path, node.op, scheme, attentions.reasons[node.name], None, count)
        elif _is_already_quantized(node):
            why = "the model has it quantized"
            layer = Layer(path, node.op, ALREADY_QUANTIZED, why, None, count)
        elif get(node.op).kind is Kind.COMPUTE and not node.is_boundary:
            why = "a small product in a loop body" if is_in_loop else _why_float(node)
            layer = Layer(path, node.op, "float", why, None, count)
        if layer is not None:
            name, weight = names.readable(path), names.weights.get(path)
            layers.append(replace(layer, name=name, value=path, weight=weight))
    return QuantizationReport(
        state.rules.name,
        layers,
        state.losses.decibels,
        weight_bytes(state.original),
        weight_bytes(state.quantized),
        state.held_out_batches,
        _count_rounded(state.choices, weights, state.lookups),
        details=_details(state),
    )


def _details(state: QuantizationState) -> dict[str, LayerDetail]:
    return {
        product.name: product_detail(
            product, choice, state.stats.get(choice.point.name), state.weights.get(product.name)
        )
        for choice in state.choices
        for product in choice.point.products
    }


def _count_rounded(
    choices: list[Choice], weights: Mapping[str, QuantizedWeights], lookups: list[Lookup]
) -> int:
    found: set[Any] = {id(made) for made in weights.values()}
    found.update(weight_key(one.table) for one in lookups if one.product is None)
    for product in (p for choice in choices for p in choice.point.products):
        if product.is_recurrent and product.name in weights:  # the recurrent weight R
            found.add(weight_key(product.node.inputs[2].node.attrs["value"]))  # type: ignore[union-attr]
    return len(found)


def _product_layer(
    name: str, node: Node, choice: Choice, made: QuantizedWeights | None, count: int
) -> Layer:
    activation = choice.activation
    sqnr = None if made is None else made.sqnr
    layer = Layer(name, node.op, choice.scheme, choice.reason, sqnr, count)
    if activation is None or made is None:
        return layer
    alpha, clip_ratio = activation.smoothquant_alpha, activation.clip_ratio
    return replace(layer, smoothing=alpha, clip_ratio=clip_ratio)


def _with_paths(
    graph: Graph, path: str, is_in_loop: bool = False
) -> Iterator[tuple[str, Graph, Node, bool]]:
    """Every node with its path, graph and whether it is in a loop; bodies follow their graph."""
    for node in graph.nodes:
        yield path + node.name, graph, node, is_in_loop
    for node in graph.nodes:
        for name, body in node.bodies.items():
            inner = is_in_loop or node.op != "if"
            yield from _with_paths(body, f"{path}{node.name}/{name}/", inner)


def _lookup_layer(
    lookup: Lookup,
    chosen: Mapping[Node, Choice],
    weights: Mapping[str, QuantizedWeights],
    names: LayerNames,
) -> Layer:
    name, product = lookup.node.name, lookup.product
    if product is None:
        sqnr = decibels(lookup.error())
        return Layer(name, "embedding", "weight_only", "rows of i8", sqnr, 0)
    made = weights.get(product.name)
    if made is None:
        why = f"its table is the weight of {names.readable(product.name)}, which stays float"
        return Layer(name, "embedding", "float", why, None, 0)
    activation = chosen[product.node].activation
    sqnr = decibels(lookup.error(made, None if activation is None else activation.factors))
    why = f"rows of i8, the weight of {names.readable(product.name)}"
    return Layer(name, "embedding", "weight_only", why, sqnr, 0)


def _why_float(node: Node) -> str:
    if node.op in ("matmul", "grouped_matmul", "conv", *GATES):
        if _is_dequantized(node.inputs[1]):
            return "its weight is already quantized"
        return "its weight is not an f32 constant"
    return f"{node.op} runs in float"


def _is_already_quantized(node: Node) -> bool:
    """Whether the node multiplies two quantized operands."""
    if node.op in ("integer_matmul", "integer_conv", "integer_grouped_matmul"):
        return True
    operands = node.inputs[:2]
    products = "matmul", "conv", "grouped_matmul"
    return node.op in products and all(map(_is_dequantized, operands))


def _is_dequantized(value: Value | None) -> bool:
    while value is not None and value.node.op in ("transpose", "reshape"):
        value = value.node.inputs[0]
    if value is None or value.node.op != "dequantize":
        return False
    qvalues = value.node.inputs[0]
    return qvalues is not None and qvalues.dtype.bits <= 8


def weight_bytes(graph: Graph) -> int:
    """Bytes of all constants and parameters, packed as in a file; shared arrays count once."""
    found: dict[Any, int] = {}
    for _, node in graph.walk():
        array = node.attrs.get("value") if node.op in ("constant", "parameter") else None
        if array is not None:
            key = weight_key(array) if array.size else id(node)
            found[key] = node.outputs[0].dtype.nbytes(int(array.size))
    return sum(found.values())
