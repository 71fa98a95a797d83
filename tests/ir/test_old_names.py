"""Graphs that the last release saved load under the present names of ops and attributes."""

import numpy as np
import pytest

import bitwright as bw
from bitwright import aliases, warn
from bitwright.ir import parse, to_text
from bitwright.ir.container import from_bytes, to_bytes
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.registry import all_ops


@pytest.fixture(autouse=True)
def _fresh_warnings():
    warn.forget()
    yield
    warn.forget()


def quantized():
    b = Builder("net")
    x = b.input("x", "f32[3, 4]")
    q = b.requantize(x, np.uint8(3), to="u8")
    return b.build(y=b.lookup_table(q, np.arange(256)[::-1].astype(np.uint8)))


def attention():
    b = Builder("net")
    x = b.input("x", "f32[1, 2, 3, 4]")
    return b.build(y=b.attention(x, x, x, int8=True))


def old_text(graph):
    text = to_text(graph).replace(" requantize(", " to_codes(").replace("int8=", "in_codes=")
    return text.replace(" lookup_table(", " map_codes(")


@pytest.mark.parametrize("graph", [quantized(), attention()], ids=["ops", "attributes"])
def test_text_of_the_last_release(graph):
    assert old_text(graph) != to_text(graph)
    with pytest.warns(warn.BitwrightWarning, match="deprecated; use"):
        again = parse(old_text(graph))
    assert to_text(verify(again)) == to_text(graph)


def test_container_of_the_last_release(tmp_path):
    data = to_bytes(quantized())
    old = data.replace(b" requantize(", b" to_codes(  ").replace(
        b" lookup_table(", b" map_codes(   "
    )
    assert old != data
    with pytest.warns(warn.BitwrightWarning, match="'to_codes'.*use 'requantize'"):
        again = from_bytes(old)
    assert to_text(again) == to_text(quantized())
    (tmp_path / "net.bw").write_bytes(old)
    assert to_text(bw.load(tmp_path / "net.bw")) == to_text(again)


def test_every_present_name_exists():
    functions = {"quantized_matmul"}  # a function of exported files, not an op
    assert set(aliases.OPS.values()) - functions <= set(all_ops())
    attrs = {name for op in all_ops().values() for name in op.attrs}
    assert set(aliases.ATTRIBUTES.values()) <= attrs
    assert not set(aliases.OPS) & set(all_ops()) and not set(aliases.ATTRIBUTES) & attrs
