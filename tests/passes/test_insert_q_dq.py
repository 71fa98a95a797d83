"""insert_q_dq: users of the pairs, idempotence, bodies, errors."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import CalibrationError, GraphError, QuantizationError
from bitwright.quant import CalibrationEntry, CalibrationRecord, QuantParams, insert_q_dq

per_tensor, per_channel = CalibrationEntry.per_tensor, CalibrationEntry.per_channel


def chain(element="f32", sizes="2, 3"):
    b = bw.Builder("chain")
    with b.at("model.py:7"):
        r = b.relu(b.input("x", f"{element}[{sizes}]"), name="r")
    return b.build(b.exp(r, name="y"), r)


def branches():
    """if flag: relu(x) + relu(x), else -x, with a relu of the same name inside and outside."""
    bodies = []
    for name in ("then", "else"):
        inner = bw.Builder(name)
        x = inner.input("x", "f32[4]")
        r = inner.relu(x, name="r" if name == "then" else "n")
        bodies.append(inner.build(inner.add(r, r, name="sum")))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[4]")
    y = b.if_(flag, x, name="choice", then=bodies[0], **{"else": bodies[1]})
    return b.build(y)


def run(graph, **feeds):
    return bw.compile(graph, target="reference").run(feeds)


def test_users_and_outputs_read_the_dequantized_value():
    graph = insert_q_dq(chain(), CalibrationRecord({"r": per_tensor(0.5)}))
    (_, y), (output, pair) = graph.outputs
    assert output == "r" and pair.name == "r.dequantized"
    assert y.name == "y" and y.node.inputs == (pair,)
    assert pair.node.inputs[0].node.inputs[0].name == "r"
    assert pair.node.loc == pair.node.inputs[0].node.loc == "model.py:7"
    got = run(graph, x=np.array([[0.2, 0.3, -1], [0.74, 63.4, 99]], np.float32))
    np.testing.assert_array_equal(got["r"], [[0, 0.5, 0], [0.5, 63.5, 63.5]])
    np.testing.assert_allclose(got["y"], np.exp(got["r"]), rtol=1e-6)


def test_a_value_that_is_only_an_output_is_quantized_too():
    graph = insert_q_dq(chain(), {"y": per_tensor(0.25)})
    assert dict(graph.outputs)["y"].node.op == "dequantize"
    assert len(graph.nodes) == len(chain().nodes) + 3


def test_the_pass_is_idempotent():
    record = CalibrationRecord({"x": per_tensor(0.1, 3, "u8"), "r": per_channel(1, [1, 2, 3])})
    once = insert_q_dq(chain(), record)
    assert insert_q_dq(once, record) is once
    assert insert_q_dq(once, {}) is once


def test_other_parameters_insert_another_pair():
    once = insert_q_dq(chain(), {"r": per_tensor(0.5)})
    twice = insert_q_dq(once, {"r": per_tensor(0.25)})
    assert sum(node.op == "quantize" for node in twice.nodes) == 2
    assert len({value.name for node in twice.nodes for value in node.outputs}) == len(twice.values)


@pytest.mark.parametrize("element", ["f16", "bf16", "f64"])
def test_the_value_keeps_its_own_type(element):
    graph = insert_q_dq(chain(element), {"r": per_tensor(0.5, 1, "uint8")})
    assert dict(graph.outputs)["r"].type == chain(element).value("r").type
    x = np.array([[0.2, 0.3, -1], [0.74, 63.4, 999]]).astype(bw.dtype(element).numpy)
    expected = [[0, 0.5, 0], [0.5, 63.5, 127]]
    np.testing.assert_array_equal(run(graph, x=x)["r"].astype(np.float64), expected)


@pytest.mark.parametrize("element", ["i4", "u2", "i16", "f8e4m3fn"])
def test_other_element_types(element):
    graph = insert_q_dq(chain(), {"r": per_tensor(0.5, dtype=element)})
    got = run(graph, x=np.array([[0.25, 1, 1.5], [0.5, 0, -4]], np.float32))["r"]
    np.testing.assert_array_equal(got[1], [0.5, 0, 0])


def test_per_channel_scales():
    entry = per_channel(-1, [0.5, 1, 2], [1, 0, -128])
    x = np.full((2, 3), 1.2, np.float32)
    got = run(insert_q_dq(chain(), {"r": entry}), x=x)["r"]
    np.testing.assert_array_equal(got, [[1, 1, 2]] * 2)


def test_values_of_bodies_are_found_by_name_and_by_path():
    x = np.array([0.3, 0.6, -1, 0.9], np.float32)
    for name in ("r", "choice/then/r"):
        record = CalibrationRecord({name: per_tensor(0.5)})
        graph = insert_q_dq(branches(), record)
        assert insert_q_dq(graph, record) is graph
        (choice,) = run(graph, flag=np.array(True), x=x).values()
        np.testing.assert_array_equal(choice, [1, 1, 0, 2])
        (choice,) = run(graph, flag=np.array(False), x=x).values()
        np.testing.assert_array_equal(choice, np.maximum(x, 0) * 2)


def test_a_name_of_several_values_must_be_a_path():
    with pytest.raises(GraphError, match=r"choice/then/sum.*choice/else/sum"):
        insert_q_dq(branches(), {"sum": per_tensor(1)})


def test_a_state_update_reads_the_dequantized_value():
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(2, np.float32))
    total_after = b.add(total, b.input("x", "f32[2]"), name="after")
    b.update(total, total_after)
    graph = insert_q_dq(b.build(total_after), {"after": per_tensor(1)})
    exe = bw.compile(graph, target="reference")
    for expected in ([1, 0], [2, 0], [3, 0]):
        assert exe.run({"x": np.array([0.8, 0.2], np.float32)})["after"].tolist() == expected


@pytest.mark.parametrize(
    "entry, message",
    [
        (per_tensor(0), "a scale is not positive.*found 0"),
        (per_tensor(-1), "not positive.*found -1"),
        (per_tensor(np.nan), "found nan"),
        (per_tensor(1e60), "found inf"),
        (per_tensor(1e-60), "found 0.0"),
        (per_tensor(1, 128), r"outside the type.*-128\.\.127 for int8.*found 128"),
        (per_tensor(1, 0.5), "whole number"),
        (per_tensor(1, 1, "f8e4m3fn"), "f8e4m3fn has no asymmetric scheme"),
        (per_channel(2, [1, 1, 1]), "axis 2 is outside a tensor of rank 2"),
        (per_channel(1, [1, 1]), r"scales do not match axis 1.*expected \[3\], found \[2\]"),
        (per_channel(1, [1, -1, 1]), "a scale at index 1"),
        (per_channel(1, [1, 1, 1], [0, 0]), "differ in shape"),
        (CalibrationEntry(None, [1, 2], [0, 0], "i8"), "expected 1, found"),
    ],
)
def test_invalid_entries_are_errors(entry, message):
    with pytest.raises(CalibrationError, match=message) as error:
        insert_q_dq(chain(), CalibrationRecord({"r": entry}))
    assert "the entry of 'r'" in str(error.value)


def test_an_entry_has_a_quantized_type():
    with pytest.raises(QuantizationError, match="no quantized type is named 'i32'"):
        per_tensor(1, dtype="i32")


def test_quant_params_are_entries_too():
    params = QuantParams.asymmetric("uint8", [0.5, 1, 2], [1, 2, 3], axis=1)
    entry = per_channel(1, [0.5, 1, 2], [1, 2, 3], "u8")
    assert CalibrationEntry.from_params(params) == entry
    x = np.full((2, 3), 1.2, np.float32)
    found, expected = (run(insert_q_dq(chain(), {"r": one}), x=x)["r"] for one in (params, entry))
    np.testing.assert_array_equal(found, expected)


def test_only_floating_values_with_fixed_channels_are_quantized():
    with pytest.raises(CalibrationError, match="only floating values"):
        insert_q_dq(branches(), {"flag": per_tensor(1)})
    with pytest.raises(CalibrationError, match="no fixed number of channels"):
        insert_q_dq(chain(sizes="n, 3"), {"r": per_channel(0, [1, 1])})


def test_an_unknown_value_is_named():
    with pytest.raises(GraphError, match=r"no value 'rr'.*Did you mean 'r'"):
        insert_q_dq(chain(), {"rr": per_tensor(1)})


def test_a_record_round_trips_through_bytes_and_file(tmp_path):
    scales = np.float32([0.1, 1 / 3, 7])
    record = CalibrationRecord(
        {"a": per_tensor(0.1, 7, "u8"), "b/then/é": per_channel(-1, scales, dtype="i4")}
    )
    record.save(tmp_path / "record.json")
    for back in (
        CalibrationRecord.load(tmp_path / "record.json"),
        CalibrationRecord.from_bytes(record.to_bytes()),
    ):
        assert list(back) == ["a", "b/then/é"] and back == record
        assert back["b/then/é"].scales.tobytes() == scales.tobytes()


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"format": "x", "entries": {}}', b"\xff"])
def test_other_bytes_are_not_a_record(data):
    with pytest.raises(CalibrationError):
        CalibrationRecord.from_bytes(data)
    with pytest.raises(CalibrationError, match="cannot read"):
        CalibrationRecord.load("/nonexistent/record")
