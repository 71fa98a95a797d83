"""Gradients of attention: scores are computed again, block by block, and stay in cache.

For a key head, and each block of queries that reads it, lanes run along queries:

    p[key][query]  = k[key][:] · q[:][query]        dp[key][query] = v[key][:] · dy[:][query]
    p = softmax(p)     ds = p * (dp - sum(p * dp)) * scale         replaces dp
    dv[key][:] += p[key][:] · dy[:][:]     dk[key][:] += ds[key][:] · q[:][:]
    dq[query][:] = ds[:][query] · k[:][:]

A work item is (batch, key head): one thread adds up the gradients of its keys, over its query heads
and blocks in a fixed order, so results do not depend on the number of threads. Causal attention,
windows and lengths limit the keys of a block. `backward_spec` describes the work buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i32, i64
from bitwright.backends.cpu.codegen.emit.types import storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.codegen.math.exp_nonpositive import exp_nonpositive
from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.attention.backward_spec import (
    Backward,
    Work,
    backward_tiles,
)
from bitwright.backends.cpu.kernels.attention.tile_product import Matrix, column_groups, emit_tiles
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of, store


def emit_attention_backward(module: Module, name: str, kernel: Backward) -> Signature:
    with module.kernel(name, kernel.signature) as f, f.subnormals_as_zeros():
        items = f.udiv(f.args.size("batches") * f.args.size("heads"), f.args.size("group"))
        parts = f.max(f.min(f.threads, f.args.size("parts")), 1)
        thread = f.min(f.thread, parts)
        begin = f.udiv(items * thread, parts)
        end = f.udiv(items * f.min(thread + 1, parts), parts)
        head = _KeyHead(f, kernel, thread)
        with f.loop(begin, end) as loop:
            head.emit(loop.index)
    return kernel.signature


class _KeyHead:
    """The gradients of one key head, and of the queries that read it."""

    def __init__(self, f: Kernel, backward: Backward, thread: Value) -> None:
        self.f, self.backward, self.kernel = f, backward, backward.kernel
        self.tiles = backward_tiles(f.target, self.kernel)
        self.work = Work(self.kernel, self.tiles)
        self.type, self.lanes = self.kernel.type, self.tiles.lanes
        self.vector = self.type.vector(self.lanes)
        self.stored = storage_type(self.kernel.element)
        self.pitch = self.tiles.queries
        self.rows = f.args.size("rows")
        place = f.gep(self.type, f.args.pointer("work"), thread * f.args.size("part"))
        self.parts: dict[str, Value] = {}
        for name, count in self.work.fixed.items():
            self.parts[name] = place
            place = f.gep(self.type, place, count)
        for name, each in self.work.per_key.items():
            self.parts[name] = place
            place = f.gep(self.type, place, self.rows * each)

    def emit(self, number: Value) -> None:
        f, work = self.f, self.work
        key_heads = f.udiv(f.args.size("heads"), f.args.size("group"))
        self.batch, self.key_head = f.udiv(number, key_heads), f.urem(number, key_heads)
        keys, queries = f.args.size("keys"), f.args.size("queries")
        index = (self.batch, self.key_head)
        sides = (("k", "keys", "dk", work.width), ("v", "values", "dv", work.value_width))
        for name, packed, sums, width in sides:
            self._pack_rows(name, index, f.index(0), keys, self.parts[packed], width)
            self._clear(
                f.gep(self.type, self.parts[packed], keys * width), (self.rows - keys) * width
            )
            self._clear(self.parts[sums], self.rows * width)
        group = f.args.size("group")
        with f.loop(0, group) as heads:
            head = self.key_head * group + heads.index
            with f.loop(0, pieces(f, queries, self.pitch)) as blocks:
                first = blocks.index * self.pitch
                count = f.min(queries - first, self.pitch)
                item = spec.work_item(
                    f, self.kernel, self.batch * f.args.size("heads") + head, first, count
                )
                self._block(item)
        for name, width in (("dk", work.width), ("dv", work.value_width)):
            if name in self.backward.wanted:
                self._write_rows(name, index, f.index(0), keys, self.parts[name], width)

    # a block of queries

    def _block(self, item: spec.WorkItem) -> None:
        f, work, parts = self.f, self.work, self.parts
        index = (item.batch, item.head)
        places = ((item.first, item.count, parts[name]) for name in ("q", "dy"))
        for name, width, place in zip(
            ("q", "dy"), (work.width, work.value_width), places, strict=True
        ):
            self._pack_rows(name, index, *place, width)
        with f.if_(f.lt(item.low, item.high)) as branch:
            self._transpose("q", "qt", work.width, item.count, self.kernel.scale)
            self._transpose("dy", "dyt", work.value_width, item.count, 1.0)
            self._gradients(item)
        with branch.else_():
            self._clear(parts["dq"], f.index(self.pitch * work.width))
        if "dq" in self.backward.wanted:
            self._write_rows("dq", index, item.first, item.count, parts["dq"], work.width)

    def _gradients(self, item: spec.WorkItem) -> None:
        f, parts, pitch = self.f, self.parts, self.pitch
        low, high = item.low, item.high
        width, value_width = self.work.width, self.work.value_width
        if self.kernel.mask == spec.FULL_MASK:
            self._pack_bias(item)
        tops = self._scores(item)
        self._product(
            Matrix(parts["values"], value_width, 1),
            Matrix(parts["dyt"], pitch),
            Matrix(parts["dp"], pitch),
            (low, high),
            self.kernel.value_features,
            pitch,
        )
        self._softmax(low, high, tops)
        for name in ("p", "dp"):  # tiles of keys are whole
            self._clear(f.gep(self.type, parts[name], high * pitch), f.index(24 * pitch))
        sums = (("dv", "p", "dy", value_width), ("dk", "dp", "q", width))
        for result, weights, rows, columns in sums:
            if result in self.backward.wanted:
                self._product(
                    Matrix(parts[weights], pitch, 1),
                    Matrix(parts[rows], columns),
                    Matrix(parts[result], columns),
                    (low, high),
                    item.count,
                    columns,
                    adds=True,
                )
        if "dq" in self.backward.wanted:
            self._product(
                Matrix(f.gep(self.type, parts["dp"], low * pitch), 1, pitch),
                Matrix(f.gep(self.type, parts["keys"], low * width), width),
                Matrix(parts["dq"], width),
                (f.index(0), item.count),
                high - low,
                width,
                even=True,
            )

    def _product(
        self,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        rows: tuple[Value, Value],
        depth: Value | int,
        columns: int,
        adds: bool = False,
        even: bool = False,
    ) -> None:
        """c[row][:] = (or +=) the sum over `depth` of a[row][d] b[d][:], for a range of rows."""
        f, lanes = self.f, self.lanes
        for start, count in column_groups(columns // lanes, self.tiles.columns):
            height = self.tiles.rows(count, even)
            with f.loop(*rows, height, nonempty=True) as loop:
                at = [
                    f.gep(self.type, c.start, (loop.index + r) * c.row + (start + v) * lanes)
                    for r in range(height)
                    for v in range(count)
                ]
                first = [f.load(self.vector, place) for place in at] if adds else None
                sums = emit_tiles(
                    f, self.vector, a, b, loop.index, start, (height, count), depth, first
                )
                for place, total in zip(at, sums, strict=True):
                    f.store(total, place)

    def _scores(self, item: spec.WorkItem) -> list[Value]:
        """Store the scores of a block; return the maximum of each query."""
        f, parts, lanes = self.f, self.parts, self.lanes
        tops: list[Value] = []
        for start, count in column_groups(self.tiles.vectors, self.tiles.columns):
            height = self.tiles.rows(count)
            lowest = (f.const(self.vector, -math.inf),) * count
            with f.loop(item.low, item.high, height, carry=lowest, nonempty=True) as loop:
                sums = emit_tiles(
                    f,
                    self.vector,
                    Matrix(parts["keys"], self.work.width, 1),
                    Matrix(parts["qt"], self.pitch),
                    loop.index,
                    start,
                    (height, count),
                    self.kernel.features,
                    None,
                )
                found = [list(sums[r * count : (r + 1) * count]) for r in range(height)]
                # keys past the last repeat its index: what they see changes no maximum
                numbers = [f.min(loop.index + r, item.high - 1) for r in range(height)]
                at = [
                    [(loop.index + r) * self.pitch + (start + v) * lanes for v in range(count)]
                    for r in range(height)
                ]
                found = self._add_bias(item, found, numbers, at)
                found = self._mask_edges(item, found, loop.index, start)
                highest = list(loop.carried)
                inside = [f.lt(loop.index + r, item.high) for r in range(height)]
                for r, row in enumerate(found):
                    for v, score in enumerate(row):
                        f.store(score, parts["p"], at[r][v])
                        seen = f.select(inside[r], score, -math.inf)
                        highest[v] = f.quick_max(seen, highest[v])
                loop.next(*highest)
            tops += loop.results
        return tops

    def _add_bias(
        self,
        item: spec.WorkItem,
        found: list[list[Value]],
        numbers: Sequence[Value],
        at: Sequence[Sequence[Value]],
    ) -> list[list[Value]]:
        """Scores with softcap and mask; the cap's derivative is stored."""
        f, kernel = self.f, self.kernel
        if kernel.softcap > 0:
            for row, places in zip(found, at, strict=True):
                for v, place in enumerate(places):
                    bent = vector_math.tanh(f, row[v] * (1.0 / kernel.softcap))
                    slope = f.sub(kernel.scale, f.mul(bent * bent, kernel.scale))
                    f.store(slope, self.parts["slope"], place)
                    row[v] = bent * kernel.softcap
        if kernel.mask == spec.KEY_MASK:
            index = (item.batch, item.head, 0)
            for row, number in zip(found, numbers, strict=True):
                added = spec.mask_bias(f, kernel, index, number, 1, None)
                row[:] = [score + f.splat(added, self.lanes) for score in row]
        if kernel.mask == spec.FULL_MASK:
            for row, places in zip(found, at, strict=True):
                bias = [f.load(self.vector, self.parts["p"], place) for place in places]
                row[:] = [score + added for score, added in zip(row, bias, strict=True)]
        return found

    def _mask_edges(
        self, item: spec.WorkItem, found: list[list[Value]], key: Value, start: int
    ) -> list[list[Value]]:
        """Scores with -inf where a query must not see a key; compares only in edge tiles."""
        f, kernel = self.f, self.kernel
        if not kernel.has_edges:
            return found
        height, count = len(found), len(found[0])
        first, last = item.position, item.position + item.count - 1
        inside: list[Value] = []
        if kernel.causal:
            inside.append(f.le(key + (height - 1), first))
        if kernel.window is not None:
            inside.append(f.gt(key, last - kernel.window))
        if kernel.window_right is not None:
            inside.append(f.le(key + (height - 1), first + kernel.window_right))
        flat = [score for row in found for score in row]
        with f.if_(f.not_(f.combine(inside, f.and_)), carry=flat) as branch:
            begin = f.splat(f.convert(item.position, i32), self.lanes)
            changed = []
            for r, row in enumerate(found):
                number = f.convert(key + r, i32)
                for v, score in enumerate(row):
                    lanes = range((start + v) * self.lanes, (start + v + 1) * self.lanes)
                    positions = begin + f.const_vector(i32, lanes)
                    seen = spec.visible(f, kernel, positions, number, i32.vector(self.lanes))
                    changed.append(f.select(seen, score, -math.inf))
            branch.next(*changed)
        flat = list(branch.results)
        return [flat[r * count : (r + 1) * count] for r in range(height)]

    def _softmax(self, low: Value, high: Value, tops: Sequence[Value]) -> None:
        """Replace scores by weights, and gradients of weights by those of scores."""
        f, parts, lanes = self.f, self.parts, self.lanes
        shifts = [f.select(f.eq(top, -math.inf), 0.0, top) for top in tops]
        zero = f.const(self.vector, 0.0)
        count = len(tops)

        def powers(key: Value, _: None, *totals: Value) -> list[Value]:
            found = list(totals)
            for v in range(count):
                at = key * self.pitch + v * lanes
                power = exp_nonpositive(f, f.load(self.vector, parts["p"], at) - shifts[v])
                f.store(power, parts["p"], at)
                found[v] = totals[v] + power
                gradient = f.load(self.vector, parts["dp"], at)
                found[count + v] = f.fma(power, gradient, totals[count + v])
            return found

        totals = f.vectors(low, high, 1, powers, (zero,) * (2 * count))
        factors = [f.select(f.eq(t, 0.0), 0.0, f.div(1.0, t)) for t in totals[:count]]
        means = [t * factor for t, factor in zip(totals[count:], factors, strict=True)]

        def weights(key: Value, _: None) -> None:
            for v in range(count):
                at = key * self.pitch + v * lanes
                weight = f.load(self.vector, parts["p"], at) * factors[v]
                gradient = weight * (f.load(self.vector, parts["dp"], at) - means[v])
                if "slope" in parts:
                    gradient = gradient * f.load(self.vector, parts["slope"], at)
                else:
                    gradient = gradient * self.kernel.scale
                f.store(weight, parts["p"], at)
                f.store(gradient, parts["dp"], at)

        f.vectors(low, high, 1, weights)

    # packing

    def _clear(self, start: Value, count: Value) -> None:
        """Write zeros to a multiple of whole vectors."""
        f = self.f
        with f.loop(0, count, self.lanes) as loop:
            f.store(f.const(self.vector, 0.0), start, loop.index)

    def _features(self, name: str) -> int:
        kernel = self.kernel
        return kernel.features if name in ("q", "k", "dq", "dk") else kernel.value_features

    def _pack_rows(
        self,
        name: str,
        index: tuple[Value, Value],
        first: Value,
        count: Value,
        target: Value,
        width: int,
    ) -> None:
        """Copy rows of an operand in the computed type; padding features are zeros."""
        f, features = self.f, self._features(name)
        base, step = address_of(f, name, self.stored, (*index, first)), f.args.size(f"{name}.2")
        with f.loop(0, count) as loop:
            row = f.gep(self.stored, base, loop.index * step)
            for column in range(0, features, self.lanes):
                left = features - column
                mask = f.mask(f.const(i64, left), self.lanes) if left < self.lanes else None
                value = load_computed(f, self.kernel.element, self.lanes, row, column, mask=mask)
                f.store(value, target, loop.index * width + column)

    def _write_rows(
        self,
        name: str,
        index: tuple[Value, Value],
        first: Value,
        count: Value,
        source: Value,
        width: int,
    ) -> None:
        f, features, element = self.f, self._features(name), self.kernel.element
        base, step = address_of(f, name, self.stored, (*index, first)), f.args.size(f"{name}.2")
        with f.loop(0, count) as loop:
            row = f.gep(self.stored, base, loop.index * step)
            for column in range(0, features, self.lanes):
                left = features - column
                mask = f.mask(f.const(i64, left), self.lanes) if left < self.lanes else None
                value = f.load(self.vector, source, loop.index * width + column)
                store(f, value, element, row, column, mask)

    def _transpose(self, name: str, target: str, width: int, count: Value, scale: float) -> None:
        """Rows of a block as [feature][query]; rows past the last query repeat it."""
        f, lanes, source = self.f, self.lanes, self.parts[name]
        with f.loop(0, self.pitch, lanes, nonempty=True) as vectors:
            rows = [
                f.gep(self.type, source, f.min(count - 1, vectors.index + r) * width)
                for r in range(lanes)
            ]
            with f.loop(0, width, lanes, nonempty=True) as loop:
                block = [f.load(self.vector, row, loop.index) for row in rows]
                for number, column in enumerate(transposed(f, block)):
                    value = column if scale == 1.0 else column * scale
                    at = (loop.index + number) * self.pitch + vectors.index
                    f.store(value, self.parts[target], at)

    def _pack_bias(self, item: spec.WorkItem) -> None:
        """The mask of the block as additive bias, keys by queries, where the scores go."""
        f, lanes = self.f, self.lanes
        with f.loop(0, self.pitch, lanes, nonempty=True) as vectors:
            queries = [item.first + f.min(item.count - 1, vectors.index + r) for r in range(lanes)]
            with f.loop(item.low, item.high, lanes, nonempty=True) as loop:
                inside = f.mask(item.high - loop.index, lanes)
                places = [(item.batch, item.head, query) for query in queries]
                block = [
                    spec.mask_bias(f, self.kernel, at, loop.index, lanes, inside) for at in places
                ]
                for number, column in enumerate(transposed(f, block)):
                    at = (loop.index + number) * self.pitch + vectors.index
                    f.store(column, self.parts["p"], at)
