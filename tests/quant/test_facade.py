"""The facade, the observer and measured quality."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import QuantizationError
from bitwright.quant import Observer, Statistics, quality, quantize_tensor


@pytest.fixture
def system():
    return bw.QuantizationSystem("cpu")


def test_hardware(system):
    hardware = system.hardware
    assert hardware.parallel_units >= 1 and hardware.vector_bytes >= 8 and hardware.name
    with pytest.raises(QuantizationError, match="expected cpu, found abacus"):
        bw.QuantizationSystem("abacus")


def test_speed_and_accuracy(system):
    statistics = Statistics()
    statistics.add(np.random.default_rng(0).gamma(1, 1, 5000))
    fast = system.parameters("int8", "speed", statistics)
    accurate = system.parameters("int8", "accuracy", statistics)
    assert fast.scheme.name == "symmetric" and accurate.scheme.name == "asymmetric"
    for kind in ("uint8", "f8e4m3fn", "binary", "int4"):
        assert system.parameters(kind, "accuracy", statistics).dtype.name == kind
    with pytest.raises(QuantizationError, match="accuracy or speed"):
        system.parameters("int8", "beauty")


def test_quantize_matmul_and_measure(system):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(5, 32)), rng.normal(size=(32, 4))
    parameters = system.calibrate([x, 2 * x], "uint8", "mse")
    qx, qw = system.quantize(x, parameters), system.quantize(w, "int8", axis=1)
    y = system.matmul(qx, qw)
    assert quality(x @ w, y).sqnr > 25
    assert system.measure(w, qw).sqnr > 35
    out = system.matmul(qx, qw, output=system.calibrate([y], "int8"))
    np.testing.assert_allclose(system.dequantize(out), y, atol=0.6 * out.parameters.scale)
    assert system.create_tensor((3, 1), "uint4").dequantize().tolist() == [[0], [0], [0]]


def test_observers_merge_clear_and_refuse():
    x = np.random.default_rng(2).normal(size=(4, 50))
    whole, left, right = Observer(axis=0), Observer(axis=0), Observer(axis=0)
    whole.add(x[:, :20]).add(x[:, 20:])
    left.add(x[:, :20])
    right.add(x[:, 20:])
    for method in ("minmax", "percentile", "mse"):
        one = whole.calibrate("int8", method)
        assert one == Observer(axis=0).merge(left).merge(right).calibrate("int8", method)
    whole.clear()
    with pytest.raises(QuantizationError, match="nothing was observed"):
        whole.calibrate("int8")
    with pytest.raises(QuantizationError, match="array 1 holds values that are not finite"):
        Observer().add([1.0, np.nan])
    loose = Observer(nonfinite="ignore").add([1.0, np.nan, np.inf]).calibrate("int8")
    assert loose.scale == np.float32(1 / 127) and "2 values were not finite" in loose.notes


def test_quality_by_hand():
    found = quality(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    assert found.max_error == 0.5 and found.mean_squared_error == 0.125
    assert found.sqnr == pytest.approx(20) and found.cosine == pytest.approx(27 / (5 * 29.25**0.5))
    same = quality(np.zeros(3), np.zeros(3))
    assert same.sqnr == np.inf and same.cosine == 1 and same.max_error == 0
    with pytest.raises(QuantizationError, match="shapes differ"):
        quality(np.zeros(3), np.zeros(4))


def test_wider_types_and_finer_scales_have_lower_errors():
    x = np.random.default_rng(3).standard_t(4, size=(16, 256)) * np.geomspace(1e-2, 10, 16)[:, None]
    sqnr = [quality(x, quantize_tensor(x, kind)).sqnr for kind in ("int2", "int4", "int8", "int16")]
    assert sqnr == sorted(sqnr)
    finer = [{}, {"axis": 0}, {"axis": 1, "block": 16}]
    sqnr = [quality(x, quantize_tensor(x, "int4", **options)).sqnr for options in finer]
    assert sqnr == sorted(sqnr)
