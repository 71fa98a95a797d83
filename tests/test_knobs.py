"""Environment variables: errors for values that are not numbers."""

import pytest

from bitwright import knobs
from bitwright.errors import BitwrightError


@pytest.mark.parametrize("text", ["many", "-1", "1e9", "", "٣"])
@pytest.mark.parametrize("knob", [knobs.FOLD_LIMIT, knobs.CACHE_BYTES, knobs.TAP_BYTES])
def test_an_invalid_number_is_an_error(monkeypatch, knob, text):
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(BitwrightError, match=f"{knob.name}: .*not a number; expected digits"):
        knob.number()


def test_bounds_of_memory(monkeypatch):
    monkeypatch.setenv(knobs.MAX_TENSOR_BYTES.name, " 4096 ")
    assert knobs.max_tensor_bytes() == 4096
    monkeypatch.setenv(knobs.MAX_TENSOR_BYTES.name, "")
    assert knobs.max_tensor_bytes() > 1 << 20
