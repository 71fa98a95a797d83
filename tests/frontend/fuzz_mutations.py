"""Mutations of a model: of bytes, of protobuf messages, and of folders with external data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fuzz_seeds import Seed, external, info, node
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

SECRET = b"not for the model, whatever it says: 0123456789abcdef" * 4
"""Bytes that lie outside the model's folder; no loaded graph may hold them."""
WHOLE = (0, 1, 2, 3, 7, 16, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 60, (1 << 63) - 1)
REAL = (0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
WORDS = ("", "x", "\0", "..", "é" * 40, "a" * 5000, "%d", "graph @x() {", "constant", "none")
ATTRIBUTES = ("axis", "axes", "perm", "to", "k", "pads", "kernel_shape", "strides", "group", "body")


# bytes


def truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def flip_bits(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if out:
            out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def splice(data: bytes, random: Random) -> bytes:
    """Remove, duplicate, move or replace bytes."""
    start = random.randrange(len(data) + 1)
    stop = min(len(data), start + random.choice((1, 2, 8, 64, 512)))
    piece = data[start:stop]
    place = random.randrange(len(data) + 1)
    fresh = random.choice(
        (b"", piece, bytes(len(piece)), b"\xff" * len(piece), random.randbytes(8))
    )
    if random.random() < 0.5:
        return data[:start] + fresh + data[stop:]
    return data[:place] + fresh + data[place:]


# protobuf messages


def parts(message: Message) -> Iterator[Message]:
    """The message and every message in it."""
    stack = [message]
    while stack:
        top = stack.pop()
        yield top
        for field, value in top.ListFields():
            if field.type == field.TYPE_MESSAGE:
                stack.extend(value if field.is_repeated else [value])


def _value(field: Any, old: Any, random: Random, names: Sequence[str]) -> Any:
    """Another value of the field."""
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return random.choice(REAL)
    if field.type == field.TYPE_STRING:
        return random.choice((*WORDS, *names, *ATTRIBUTES))
    if field.type == field.TYPE_BYTES:
        return random.choice((truncate, flip_bits, splice))(bytes(old or b"\0" * 8), random)
    if field.type == field.TYPE_ENUM:
        return random.choice([value.number for value in field.enum_type.values])
    if field.type in (field.TYPE_INT32, field.TYPE_SINT32):
        number = random.choice((*WHOLE[:8], (1 << 31) - 1, random.randrange(40)))
    else:
        number = random.choice((*WHOLE, random.randrange(40)))
    unsigned = field.type in (field.TYPE_UINT32, field.TYPE_UINT64)
    return number if unsigned or random.random() < 0.6 else -number


def change_field(model: ModelProto, random: Random) -> None:
    """Change, clear or reorder one field of one message."""
    message = random.choice(list(parts(model)))
    names = [name for n in model.graph.node for name in (*n.input, *n.output)][:50]
    fields = message.DESCRIPTOR.fields
    present = [field for field, _ in message.ListFields()]
    field = random.choice(present if present and random.random() < 0.8 else list(fields))
    if field.is_repeated:
        _change_list(message, field, random, names)
    elif field.type == field.TYPE_MESSAGE or random.random() < 0.15:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), random, names))


def _change_list(message: Message, field: Any, random: Random, names: Sequence[str]) -> None:
    items = list(getattr(message, field.name))
    if field.type == field.TYPE_MESSAGE:
        items = [_copy(item) for item in items]
    kind = random.randrange(6)
    if not items or kind == 0:
        items = [] if items else items
        if field.type != field.TYPE_MESSAGE:
            items.append(_value(field, None, random, names))
    elif kind == 1:
        del items[random.randrange(len(items))]
    elif kind == 2:
        items.insert(random.randrange(len(items) + 1), random.choice(items))
    elif kind == 3:
        random.shuffle(items)
    elif kind == 4 and len(items) < 64:
        items = items * random.choice((2, 3, 8))
    elif field.type != field.TYPE_MESSAGE:
        place = random.randrange(len(items))
        items[place] = _value(field, items[place], random, names)
    message.ClearField(field.name)
    getattr(message, field.name).extend(items)


def _copy(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _tensors(model: ModelProto) -> list[TensorProto]:
    return [part for part in parts(model) if isinstance(part, TensorProto)]


def _nodes(model: ModelProto) -> list[Any]:
    found = [part for part in parts(model) if isinstance(part, GraphProto)]
    return [n for graph in found for n in graph.node]


def change_dims(model: ModelProto, random: Random) -> None:
    """Give a tensor or a declared value wrong, negative or very large sizes."""
    shapes = [t.dims for t in _tensors(model)]
    if shapes and random.random() < 0.6:
        dims = random.choice(shapes)
        size = random.choice((*WHOLE, -1, -(1 << 62)))
        if len(dims) and random.random() < 0.7:
            dims[random.randrange(len(dims))] = size
        else:
            dims.extend([size] * random.choice((1, 2, 100)))
        return
    values = [v.type.tensor_type.shape for v in (*model.graph.input, *model.graph.value_info)]
    sizes = [dim for shape in values for dim in shape.dim]
    if sizes:
        dim = random.choice(sizes)
        if random.random() < 0.7:
            dim.dim_value = random.choice((*WHOLE, -1, -(1 << 62)))
        else:
            dim.dim_param = random.choice(
                ("", "n", "n*n*n*n", "n//0", "-n", "2**99", "((((n", "u0")
            )


def change_type(model: ModelProto, random: Random) -> None:
    """Another element type, known or not."""
    code = random.choice((*range(28), 99, -1, 1 << 30))
    tensors = _tensors(model)
    if tensors and random.random() < 0.5:
        random.choice(tensors).data_type = code
    elif len(model.graph.input):
        random.choice(model.graph.input).type.tensor_type.elem_type = code


def change_data(model: ModelProto, random: Random) -> None:
    """More or fewer bytes than the shape says, in one field or in two."""
    tensors = _tensors(model)
    if not tensors:
        return
    tensor = random.choice(tensors)
    kind = random.randrange(4)
    if kind == 0:
        tensor.raw_data = tensor.raw_data + b"\1" * random.choice((1, 3, 4, 8))
    elif kind == 1:
        tensor.raw_data = tensor.raw_data[: random.randrange(len(tensor.raw_data) + 1)]
    elif kind == 2:
        tensor.int32_data.extend([1, 2, 3])
    else:
        tensor.ClearField("raw_data")
        tensor.string_data.extend([b"\xff\xfe"])


def rewire(model: ModelProto, random: Random) -> None:
    """Missing, extra, repeated or circular operands; two values of one name."""
    nodes = _nodes(model)
    if not nodes:
        return
    names = [name for n in nodes for name in (*n.input, *n.output)] or ["x"]
    chosen = random.choice(nodes)
    kind = random.randrange(7)
    if kind == 0 and chosen.input:
        del chosen.input[random.randrange(len(chosen.input))]
    elif kind == 1:
        chosen.input.extend([random.choice(names)] * random.choice((1, 2, 9)))
    elif kind == 2 and chosen.input:
        chosen.input[random.randrange(len(chosen.input))] = random.choice((*names, "", "nowhere"))
    elif kind == 3 and chosen.output:
        chosen.output[random.randrange(len(chosen.output))] = random.choice((*names, ""))
    elif kind == 4 and chosen.output:
        chosen.output.extend([random.choice((*names, "extra"))])
    elif kind == 5 and chosen.input and chosen.output:
        chosen.input[0] = chosen.output[0]
    else:
        chosen.op_type = random.choice([n.op_type for n in nodes] + ["Nonesuch", "", "Loop", "If"])


def change_attribute(model: ModelProto, random: Random) -> None:
    """An attribute with another name, kind or value, or one more."""
    nodes = _nodes(model)
    if not nodes:
        return
    chosen = random.choice(nodes)
    given = [a for n in nodes for a in n.attribute]
    kind = random.randrange(4)
    if kind == 0 and given:
        chosen.attribute.append(_copy(random.choice(given)))
    elif kind == 1 and chosen.attribute:
        random.choice(chosen.attribute).type = random.choice(
            list(AttributeProto.AttributeType.values())
        )
    elif kind == 2 and chosen.attribute:
        attribute = random.choice(chosen.attribute)
        attribute.i = random.choice((*WHOLE, -1, -(1 << 62)))
        attribute.ints[:] = [random.choice((*WHOLE, -1)) for _ in range(random.choice((1, 2, 9)))]
    else:
        value = random.choice((1, -1, 1 << 60, 1.5, "x", [1, 2], [0.5], [-(1 << 60)] * 3))
        chosen.attribute.append(helper.make_attribute(random.choice(ATTRIBUTES), value))


def change_opset(model: ModelProto, random: Random) -> None:
    if model.opset_import:
        version = random.choice((-1, 0, 1, 5, 6, 9, 12, 13, 18, 20, 22, 24, 99, 1 << 60))
        random.choice(model.opset_import).version = version
    if random.random() < 0.2:
        model.opset_import.append(helper.make_opsetid(random.choice(WORDS), 1))


def nest(model: ModelProto, random: Random) -> None:
    """Very deeply nested Ifs."""
    body = helper.make_graph([node("Identity", "x", "y")], "leaf", [], [info("y")])
    for depth in range(random.choice((3, 12, 30))):
        branch = (
            node("If", "c", "y", then_branch=body, else_branch=body)
            if depth < 8
            else node(
                "If", "c", "y", then_branch=body, else_branch=helper.make_graph([], "e", [], [])
            )
        )
        body = helper.make_graph([branch], f"level{depth}", [], [info("y")])
    if model.graph.node and model.graph.node[0].input:
        name = model.graph.node[0].input[0]
        model.graph.node.append(node("If", name, "deep", then_branch=body, else_branch=body))
        model.graph.output.append(info("deep"))


def recurse(model: ModelProto, random: Random) -> None:
    """Functions that are recursive or expand to many nodes."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    count = random.choice((1, 2, 30))
    for i in range(count):
        target = f"F{(i + 1) % count}" if random.random() < 0.5 else f"F{i + 1}"
        calls = [node(target, "a", "b", domain="local"), node(target, "b", "c", domain="local")]
        model.functions.append(helper.make_function("local", f"F{i}", ["a"], ["c"], calls, opsets))
    leaf = [node("Identity", "a", "c")]
    model.functions.append(helper.make_function("local", f"F{count}", ["a"], ["c"], leaf, opsets))
    if model.graph.node and model.graph.node[0].input:
        first = model.graph.node[0].input[0]
        model.graph.node.append(node("F0", first, "called", domain="local"))
        model.graph.output.append(info("called"))


def grow(model: ModelProto, random: Random) -> None:
    """Small models with very large values: constants of a shape, ranges, loops, tiles."""
    huge = random.choice((1 << 20, 1 << 31, 1 << 40, 1 << 60, (1 << 63) - 1))
    number = helper.make_tensor("huge", TensorProto.INT64, [1], [huge])
    scalars = [
        helper.make_tensor(f"n{value}", TensorProto.INT64, [], [value]) for value in (0, 1, huge)
    ]
    model.graph.initializer.extend([number, *scalars])
    step = helper.make_graph(
        [node("Identity", "on", "on_out"), node("Identity", "i", "row")],
        "count",
        [info("i", TensorProto.INT64), info("on", TensorProto.BOOL)],
        [info("on_out", TensorProto.BOOL), info("row", TensorProto.INT64)],
    )
    last = f"n{huge}"
    made = random.choice(
        (
            node("ConstantOfShape", "huge", "grown"),
            node("Range", f"n0 {last} n1", "grown"),
            node("Tile", "huge huge", "grown"),
            node("Expand", "n1 huge", "grown"),
            node("Loop", f"{last} ", "grown", body=step),
            node("OneHot", "huge huge huge", "grown"),
            node("EyeLike", "huge", "grown", k=huge),
            node("HannWindow", last, "grown"),
            node("RandomUniform", "", "grown", shape=[huge]),
        )
    )
    if made.op_type == "Loop":
        made.input[:] = [last, ""]
    if random.random() < 0.5:
        model.graph.node.append(node("Size", "grown", "counted"))
        model.graph.output.append(info("counted", TensorProto.INT64))
    else:
        model.graph.output.append(info("grown", TensorProto.INT64, None))
    place = len(model.graph.node) - (
        model.graph.node[-1].op_type == "Size" if model.graph.node else 0
    )
    model.graph.node.insert(place, made)


MESSAGES: tuple[Callable[[ModelProto, Random], None], ...] = (
    change_field,
    change_field,
    change_field,
    change_dims,
    change_type,
    change_data,
    rewire,
    rewire,
    change_attribute,
    change_opset,
    nest,
    recurse,
    grow,
)
BYTES = (truncate, flip_bits, splice)


def mutate(seed: Seed, random: Random) -> tuple[str, Seed]:
    """A damaged copy, and what was done to it."""
    if seed.file.endswith(".onnx") and random.random() < 0.75:
        model = ModelProto()
        try:
            model.ParseFromString(seed.data)
            done = [random.choice(MESSAGES) for _ in range(random.choice((1, 1, 2, 4)))]
            for change in done:
                change(model, random)
            data = model.SerializeToString()
        except (DecodeError, EncodeError, ValueError, TypeError, IndexError):
            return "unchanged", seed
        return "+".join(change.__name__ for change in done), replace(seed, data=data)
    change = random.choice(BYTES)
    return change.__name__, replace(seed, data=change(seed.data, random))


# folders


def _link(name: str, target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to(target)


PLACES: tuple[tuple[dict[str, str], Callable[[Path], None]], ...] = (
    ({"location": "../secret.bin", "length": "16"}, lambda folder: None),
    ({"location": "sub/../../secret.bin"}, lambda folder: (folder / "sub").mkdir()),
    ({"location": "..\\secret.bin"}, lambda folder: None),
    ({"location": "C:secret.bin"}, lambda folder: None),
    ({"location": "/etc/passwd"}, lambda folder: None),
    ({"location": "//etc/passwd"}, lambda folder: None),
    ({"location": "/dev/zero"}, lambda folder: None),
    ({"location": "link"}, _link("link", "../secret.bin")),
    ({"location": "link"}, _link("link", "/dev/zero")),
    ({"location": "link"}, _link("link", "link")),
    ({"location": "up/secret.bin"}, _link("up", "..")),
    ({"location": "pipe"}, lambda folder: os.mkfifo(folder / "pipe")),
    ({"location": "folder"}, lambda folder: (folder / "folder").mkdir()),
    ({"location": "."}, lambda folder: None),
    ({"location": ""}, lambda folder: None),
    ({"location": "missing.bin"}, lambda folder: None),
    ({"location": "a" * 5000}, lambda folder: None),
    ({"location": "nul\0byte"}, lambda folder: None),
    ({"location": "model.onnx", "offset": "0"}, lambda folder: None),
    ({"offset": "99999999999999999999"}, lambda folder: None),
    ({"offset": "-1"}, lambda folder: None),
    ({"offset": str(1 << 62)}, lambda folder: None),
    ({"offset": "0x10"}, lambda folder: None),
    ({"offset": "25"}, lambda folder: None),
    ({"length": str(1 << 62)}, lambda folder: None),
    ({"length": "-16"}, lambda folder: None),
    ({"length": "3"}, lambda folder: None),
    ({"length": ""}, lambda folder: None),
)


def misplaced(random: Random) -> tuple[str, Seed, Callable[[Path], None], bool]:
    """External data at a forbidden location or range, and whether that is the only fault: then the
    model must be refused."""
    places, prepare = random.choice(PLACES)
    seed = external(places)
    if random.random() < 0.3:
        name, seed = mutate(seed, random)
        return f"misplaced+{name}", seed, prepare, False
    return f"misplaced {places}", seed, prepare, places.get("location") != seed.file
