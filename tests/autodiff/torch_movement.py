"""PyTorch's functions that move elements, by the names of ops."""

import torch
from torch.nn import functional
from torch_layers import UnsupportedError


def gather(x, indices, axis):
    return x[(slice(None),) * (axis % x.ndim) + (indices.long(),)]


def gather_elements(x, indices, axis):
    return torch.gather(x, axis, indices.long() % x.shape[axis])


def gather_nd(x, indices, batch_dims):
    if batch_dims:
        raise UnsupportedError("PyTorch has no batch axes here")
    return x[tuple(indices.long().unbind(-1))]


def reverse_sequence(x, lengths, batch_axis, time_axis):
    moved = x.movedim((batch_axis, time_axis), (0, 1))
    rows = [
        torch.cat([row[:count].flip(0), row[count:]])
        for row, count in zip(moved, lengths.tolist(), strict=True)
    ]
    return torch.stack(rows).movedim((0, 1), (batch_axis, time_axis))


def compress(x, condition, axis):
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(axis, condition.nonzero()[:, 0])


def one_hot(indices, values, depth_operand, depth, axis):
    depth = int(depth_operand.reshape(())) if depth is None else depth
    indices = indices.detach().long()
    places = (indices % depth).unsqueeze(axis)
    shape = [1] * places.ndim
    shape[axis] = depth
    is_inside = ((indices >= -depth) & (indices < depth)).unsqueeze(axis)
    return torch.where((torch.arange(depth).reshape(shape) == places) & is_inside, *values.flip(0))


def scatter_elements(x, indices, updates, axis, reduction):
    indices = indices.long() % x.shape[axis]
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, names[reduction])


def scatter_nd(x, indices, updates, reduction):
    if reduction not in ("none", "add"):
        raise UnsupportedError("PyTorch writes or adds")
    return x.index_put(tuple(indices.long().unbind(-1)), updates, reduction == "add")


def from_attribute(function):
    """An op whose operand may replace an attribute; the attribute is compared."""

    def run(x, operand, **attrs):
        if operand is not None:
            raise UnsupportedError("sizes from an operand")
        return function(x, **attrs)

    return run


def trilu(x, operand, upper, k):
    k = k if operand is None else int(operand)
    return torch.triu(x, k) if upper else torch.tril(x, k)


def sliced(x, *operands, starts, stops, steps, axes):
    if any(operand is not None for operand in operands):
        raise UnsupportedError("positions from operands")
    for start, stop, step, axis in zip(starts, stops, steps, axes, strict=True):
        x = x.index_select(axis, torch.arange(start, stop, step))
    return x


def pad(x, value, pads_operand, pads, mode):
    pads = pads if pads_operand is None else tuple(pads_operand.tolist())
    if mode != "constant":
        return _padded_by_copies(x, pads, mode)
    begins, ends = pads[: x.ndim], pads[x.ndim :]
    pairs = [n for pair in reversed(list(zip(begins, ends, strict=True))) for n in pair]
    y = functional.pad(x, pairs)
    if value is not None:  # PyTorch's own value has no gradient
        y = torch.where(functional.pad(torch.ones_like(x), pairs) > 0, y, value.reshape(()))
    return y


def _padded_by_copies(x, pads, mode):
    for axis, size in enumerate(x.shape):
        if not size:
            raise UnsupportedError("copies of nothing")
        places = torch.arange(-pads[axis], size + pads[x.ndim + axis])
        if mode == "edge":
            places = places.clamp(0, size - 1)
        elif mode == "wrap":
            places = places % size
        elif size > 1:
            places = places % (2 * size - 2)
            places = torch.minimum(places, 2 * size - 2 - places)
        else:
            places = places * 0
        x = x.index_select(axis, places)
    return x


def fft(x, axis, inverse):
    return torch.fft.ifft(x, dim=axis) if inverse else torch.fft.fft(x, dim=axis)


def dft(x, axis, length, inverse, onesided):
    if x.shape[-1] == 1:
        x = torch.cat([x, torch.zeros_like(x)], -1)
    numbers = torch.view_as_complex(x.contiguous())
    axis = axis % x.ndim
    if onesided and inverse:
        raise UnsupportedError("a result that is real")
    y = (torch.fft.ifft if inverse else torch.fft.fft)(numbers, length, axis)
    if onesided:
        y = y.narrow(axis, 0, y.shape[axis] // 2 + 1)
    return torch.view_as_real(y)


def grid_sample(x, grid, mode, padding_mode, align_corners):
    modes = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}
    if x.ndim not in (4, 5) or (x.ndim == 5 and mode == "cubic") or 0 in x.shape:
        raise UnsupportedError("PyTorch takes two axes, or three without cubic")
    if mode == "cubic" and padding_mode != "zeros":
        raise UnsupportedError("ONNX moves the position, PyTorch the pixels around it")
    options = {"mode": modes[mode], "align_corners": align_corners}
    return functional.grid_sample(x, grid, padding_mode=padding_mode, **options)


def resize(x, sizes_operand, scales_operand, roi_operand, **attrs):
    operands = (sizes_operand, scales_operand, roi_operand)
    plain = {"roi": None, "coordinate_mode": "half_pixel", "exclude_outside": False}
    modes = {3: "linear", 4: "bilinear", 5: "trilinear"}
    is_plain = all(attrs[name] == value for name, value in plain.items())
    is_plain = is_plain and attrs["mode"] == "linear" and x.ndim in modes
    if any(operand is not None for operand in operands) or not is_plain or attrs["scales"]:
        raise UnsupportedError("other ways to interpolate")
    if attrs["sizes"][:2] != tuple(x.shape[:2]) or (attrs["antialias"] and x.ndim != 4):
        raise UnsupportedError("other axes than those of space")
    options = {"mode": modes[x.ndim], "antialias": attrs["antialias"]}
    return functional.interpolate(x, attrs["sizes"][2:], **options)


MOVEMENT = {
    "gather": gather,
    "gather_elements": gather_elements,
    "gather_nd": gather_nd,
    "reverse_sequence": reverse_sequence,
    "compress": compress,
    "one_hot": one_hot,
    "scatter_elements": scatter_elements,
    "scatter_nd": scatter_nd,
    "reshape": from_attribute(lambda x, shape, allowzero: x.reshape(shape)),
    "expand": from_attribute(lambda x, shape: x.expand(shape)),
    "tile": from_attribute(lambda x, repeats: x.repeat(repeats)),
    "transpose": lambda x, perm: x.permute(perm),
    "concat": lambda *xs, axis: torch.cat(xs, axis),
    "split": lambda x, axis, sizes: torch.split(x, sizes, axis),
    "trilu": trilu,
    "roll": lambda x, shifts, axes: torch.roll(x, shifts, axes),
    "slice": sliced,
    "pad": pad,
    "fft": fft,
    "dft": dft,
    "grid_sample": grid_sample,
    "resize": resize,
    "top_k": lambda x, count, k, axis, largest, sorted: torch.topk(
        x, int(count.reshape(())) if k is None else k, axis, largest
    )[0],
}
