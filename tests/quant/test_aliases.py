"""Names of the last release: they work, and warn once."""

import warnings

import numpy as np
import pytest
from small_models import batches, perceptron

import bitwright as bw
from bitwright import aliases, warn
from bitwright.quant.model.recipe import RECIPES, SCHEMES, recipe


@pytest.fixture(autouse=True)
def fresh_warnings():
    warn.forget()
    yield
    warn.forget()


@pytest.mark.parametrize(("old", "new"), aliases.RECIPE_OPTIONS.items())
def test_recipe_options(old, new):
    with pytest.warns(warn.BitwrightWarning, match=f"recipe option '{old}'.*'{new}'"):
        made = recipe({old: 0.5})
    assert made == recipe({new: 0.5})


@pytest.mark.parametrize("old", sorted(set(aliases.SCHEMES) - {"given"}))
def test_schemes(old):
    assert aliases.SCHEMES[old] in SCHEMES
    with pytest.warns(warn.BitwrightWarning, match=f"scheme '{old}'"):
        assert recipe({"schemes": {"a": old}}).schemes == {"a": aliases.SCHEMES[old]}


def test_old_names_warn_once_and_give_the_same_model():
    data = batches(3)
    with pytest.warns(warn.BitwrightWarning):
        old = bw.quantize(perceptron(), data, {"schemes": {"*": "dynamic"}, "guard_sqnr": 1.0})
    options = {"schemes": {"*": "dynamic_per_token"}, "min_output_sqnr_db": 1.0}
    new = bw.quantize(perceptron(), data, options)
    assert [x.scheme for x in old.report.layers] == [x.scheme for x in new.report.layers]
    with warnings.catch_warnings():
        warnings.simplefilter("error", warn.BitwrightWarning)
        recipe({"schemes": {"*": "dynamic"}, "guard_sqnr": 1.0})


def test_the_report_property():
    report = bw.quantize(perceptron(), recipe={"base": "w8", "rounding": "nearest"}).report
    with pytest.warns(warn.BitwrightWarning, match=r"share_in_8_bit.*int8_mac_fraction"):
        assert report.share_in_8_bit == report.int8_mac_fraction


def test_methods_of_a_quantized_tensor():
    tensor = bw.quantize_tensor(np.ones(3, np.float32), "int8")
    with pytest.warns(warn.BitwrightWarning, match=r"'codes'.*qvalues"):
        np.testing.assert_array_equal(tensor.codes(), tensor.qvalues())


@pytest.mark.parametrize("name", aliases.MOVED)
def test_moved_functions(name):
    with pytest.warns(warn.BitwrightWarning, match=f"bitwright.{name}.*bitwright.quant.{name}"):
        found = getattr(bw, name)
    assert found is getattr(bw.quant, name) and name not in bw.__all__
    with warnings.catch_warnings():
        warnings.simplefilter("error", warn.BitwrightWarning)
        assert getattr(bw, name) is found


def test_renamed_classes():
    with pytest.warns(warn.BitwrightWarning, match=r"bitwright.quant.Taps.*IntermediateOutputs"):
        assert bw.quant.Taps is bw.quant.IntermediateOutputs


def test_unknown_names_stay_errors():
    for module in (bw, bw.quant):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert RECIPES["int8"].schemes_allowed == ("static", "dynamic_per_token", "float")
