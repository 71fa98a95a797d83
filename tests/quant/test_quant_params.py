"""QuantParams from ranges and statistics, and one clear error for each fault."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.quant_types import Scheme
from bitwright.quant import PerAxis, PerGroup, PerTensor, QuantParams, Statistics

P = QuantParams


def test_symmetric_and_asymmetric_ranges():
    one = P.from_range("int8", -1.0, 2.54)
    assert one.scheme is Scheme.symmetric and one.zero_point == 0
    assert one.scale == np.float32(0.02)
    two = P.from_range("uint8", -1.0, 4.1)
    assert (two.scale, two.zero_point) == (np.float32(0.02), 50)
    three = P.from_range("int8", 1.0, 5.1, "asymmetric")  # the range is widened to contain 0
    assert (three.scale, three.zero_point) == (np.float32(0.02), -128)
    assert P.from_range("f8e4m3fn", -448.0, 3.0).scale == 1


def test_tiny_and_empty_ranges():
    assert P.from_range("int8", 0, 1.27e-30).scale == np.float32(1e-32)
    for low, high in ((0, 0), (0, 1e-40)):
        found = P.from_range("int8", low, high)
        assert found.scale == 1 and "scale 1" in found.notes[0]
    rows = P.from_range("uint8", np.zeros(3), np.array([0, 255, 0]), axis=0)
    assert rows.scale.tolist() == [1, 1, 1] and "2 of 3 channels" in rows.notes[0]


def test_from_statistics_spans_the_observed_range():
    statistics = Statistics(axis=1)
    statistics.add(np.array([[1, -2], [-3, 254]], np.float32))
    found = P.from_statistics(statistics, "int8")
    np.testing.assert_array_equal(found.scale, np.float32([3 / 127, 2]))
    assert found.axis == 1 and found.method == "minmax"
    with pytest.raises(QuantizationError, match="nothing was observed"):
        P.from_statistics(Statistics(), "int8")


FAULTS = {
    "the minimum is above the maximum": lambda: P.from_range("int8", 2.0, 1.0),
    "the range is not finite": lambda: P.from_range("int8", 0.0, np.inf),
    "a scale is not finite": lambda: P.symmetric("int8", np.nan),
    "a scale at index 1 is not positive": lambda: P.symmetric("int8", [1.0, 0.0], axis=0),
    "a zero point is outside the type": lambda: P.asymmetric("uint8", 1.0, 256),
    "a zero point is not a whole": lambda: P.asymmetric("uint8", 1.0, 0.5),
    "a symmetric scheme has no zero point": lambda: P("int8", "symmetric", 1.0, 1).validate(),
    "scales and zero points differ": lambda: P.asymmetric("int8", [1, 1], [1, 1, 1], axis=0),
    "an axis is missing": lambda: P.symmetric("int8", [1.0, 2.0]),
    "the scales do not match axis 1": lambda: P.symmetric("int8", [1, 2], 1).validate((2, 3)),
    "the axis is out of range": lambda: P.symmetric("int8", [1, 2], 2).validate((2, 2)),
    "the block does not fit": lambda: P.symmetric("int8", [1, 2], 0, block=-1),
    "the block size is missing": lambda: P.symmetric("int8", [[1], [2]], axis=1),
    "cannot represent negative values": lambda: P.from_range("uint8", -1.0, 1.0, "symmetric"),
    "the base is not known": lambda: P.logarithmic("int8", 1.0, base=3.0),
    "a width is not known": lambda: P.mixed([1.0, 1.0], [3, 4], axis=0),
    "the widths do not match": lambda: P.mixed([1.0, 1.0], [4], axis=0),
    "f8e4m3fn has no asymmetric scheme": lambda: P.asymmetric("f8e4m3fn", 1.0, 0),
    "mixed is not quantized per tensor": lambda: P("mixed", "symmetric", 1.0).validate(),
    "no quantized type is named 'int7'": lambda: quant_types.get("int7"),
    "no scheme is named 'odd'": lambda: P("int8", "odd", 1.0),
}


@pytest.mark.parametrize("text", FAULTS)
def test_each_fault_has_one_clear_error(text):
    with pytest.raises(QuantizationError, match=text):
        FAULTS[text]()


def test_widths_and_ranges_of_types():
    rows = {
        one.name: (one.bits, one.min, one.max, one.values_per_byte)
        for one in map(quant_types.get, quant_types.TYPES)
    }
    assert rows["int8"] == (8, -128, 127, 1) and rows["uint4"] == (4, 0, 15, 2)
    assert rows["int4"] == (4, -8, 7, 2) and rows["int2"] == (2, -2, 1, 4)
    assert rows["f8e4m3fn"] == (8, -448, 448, 1) and rows["f8e5m2"][2] == 57344
    assert rows["f4e2m1"] == (4, -6, 6, 2) and rows["binary"] == (1, 0, 1, 8)
    assert quant_types.get("i8") is quant_types.get("int8")


def test_granularity_follows_axis_and_block():
    assert P.symmetric("int8", 1.0).granularity == PerTensor()
    assert P.symmetric("int8", [1, 2], axis=1).granularity == PerAxis(1)
    assert P.symmetric("int8", [[1], [2]], axis=1, block=4).granularity == PerGroup(4, axis=1)


def test_linear_chooses_the_scheme_by_type_and_zero_point():
    assert P.linear("i8", 1.0).scheme is Scheme.symmetric
    assert P.linear("i8", 1.0, 3).scheme is P.linear("u8", 1.0).scheme is Scheme.asymmetric


def test_the_old_name_is_an_alias():
    assert bw.QuantParams is bw.QuantParams is QuantParams
