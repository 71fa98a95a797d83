"""The acceptance tests of the specification, section 7."""

import numpy as np

import bitwright as bw


def relu_graph():
    b = bw.Builder("relu")
    x = b.input("x", "f32[n]")
    return b.build(b.relu(x, name="r"))


def test_three_batches_keep_the_running_maximum_of_each_tap():
    from bitwright.quant import Calibrator

    calibrator = Calibrator(relu_graph(), ["x", "r"])
    for top in (3, 7, 10):
        calibrator.step({"x": np.array([-1, top], np.float32)})
    assert list(calibrator.max_abs()) == [10, 10]
    np.testing.assert_allclose(list(calibrator.scales()), [10 / 127, 10 / 127], rtol=1e-6)


def relu_then_add():
    b = bw.Builder("pairs")
    r = b.relu(b.input("x", "f32[4]"), name="r")
    return b.build(b.add(r, r, name="y"))


def test_a_tagged_relu_gets_a_pair_that_both_operands_of_the_add_read():
    from bitwright.quant import CalibrationEntry, CalibrationRecord, insert_q_dq

    record = CalibrationRecord({"r": CalibrationEntry.per_tensor(0.1)})
    graph = insert_q_dq(relu_then_add(), record)
    add = graph.value("y").node
    assert [v.node.op for v in add.inputs] == ["dequantize", "dequantize"]
    assert add.inputs[0] is add.inputs[1]
    assert add.inputs[0].node.inputs[0].node.op == "quantize"
    assert add.inputs[0].node.inputs[0].node.inputs[0].node.op == "relu"


def test_an_empty_record_leaves_the_node_count():
    from bitwright.quant import CalibrationRecord, insert_q_dq

    graph = relu_then_add()
    assert len(insert_q_dq(graph, CalibrationRecord({})).nodes) == len(graph.nodes)


def matmul_graph():
    b = bw.Builder("matmul")
    x, w = b.input("x", "f32[2, 3]"), b.input("w", "f32[3, 4]")
    return b.build(b.matmul(x, w, name="y"))


def test_the_f32_policy_returns_the_same_three_nodes():
    graph = matmul_graph()
    assert bw.apply_precision(graph, "f32") is graph
    assert len(graph.nodes) == 3


def test_mixed_inserts_casts_at_the_boundary_and_ends_in_a_cast_to_f32():
    graph = bw.apply_precision(matmul_graph(), "mixed")
    assert len(graph.nodes) == 6
    last = graph.outputs[0][1].node
    assert last.op == "cast" and last.types[0].dtype.name == "f32"


def test_max_pool_backward_scatters_to_the_argmax():
    image = np.array([1, 3, 2, 0], np.float32).reshape(1, 1, 2, 2)
    dy = np.full((1, 1, 1, 1), 2, np.float32)
    assert bw.nn.max_pool2d_backward(image, dy, kernel=2).reshape(-1).tolist() == [0, 2, 0, 0]

    b = bw.Builder("pool")
    y = b.mul(b.max_pool(b.input("x", "f32[1, 1, 2, 2]"), kernel=[2, 2]), 2.0)
    loss = b.reduce_sum(y, axes=[0, 1, 2, 3], keepdims=False)
    graph = bw.grad(b.build(loss=loss), "loss", wrt=["x"])
    dx = bw.compile(graph).run({"x": image})["grad.x"]
    assert dx.reshape(-1).tolist() == [0, 2, 0, 0]


class TestSystem:
    def system(self):
        return bw.QuantizationSystem("cpu")

    def test_is_created_for_the_cpu_and_names_its_device(self):
        assert "cpu" in str(self.system().device).lower()

    def test_accuracy_first_int8_parameters_are_symmetric(self):
        parameters = self.system().parameters("int8", prefer="accuracy")
        assert (parameters.dtype.name, parameters.scheme.name) == ("int8", "symmetric")

    def test_speed_first_uint8_parameters_are_asymmetric(self):
        parameters = self.system().parameters("uint8", prefer="speed")
        assert (parameters.dtype.name, parameters.scheme.name) == ("uint8", "asymmetric")

    def test_reports_at_least_one_parallel_unit(self):
        assert self.system().hardware.parallel_units >= 1

    def test_four_values_come_back_from_quantize_and_dequantize(self):
        system = self.system()
        tensor = system.quantize(np.array([-1, 0, 0.5, 1], np.float32), "int8")
        assert system.dequantize(tensor).shape == (4,)

    def test_a_tensor_quantized_automatically_keeps_shape_and_dtype(self):
        tensor = bw.quantize_tensor(np.ones((2, 3), np.float32), "int8")
        assert tensor.shape == (2, 3) and tensor.parameters.dtype.name == "int8"

    def test_ideal_savings(self):
        from bitwright.ir import quant_types

        saving = [quant_types.get(name).ideal_saving for name in ("int8", "int4", "binary")]
        assert saving == [0.75, 0.875, 0.96875]

    def test_measured_accuracy_orders_widths_and_granularities(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(8, 64)).astype(np.float32) * 10.0 ** np.arange(-4, 4)[:, None]

        def sqnr(**options):
            back = bw.quantize_tensor(x, **options).dequantize()
            return 10 * np.log10((x**2).sum() / ((x - back) ** 2).sum())

        assert sqnr(dtype="int8") >= sqnr(dtype="int4")
        errors = [
            np.abs(x - bw.quantize_tensor(x, dtype="int8", axis=axis).dequantize()).mean(1)
            for axis in (0, None)
        ]
        per_channel, per_tensor = (error / np.abs(x).mean(1) for error in errors)
        assert per_channel.mean() <= per_tensor.mean()

    def test_calibration_from_two_samples_gives_int8_parameters(self):
        samples = [np.array([-1, 2], np.float32), np.array([3, -4], np.float32)]
        assert self.system().calibrate(samples, "int8", method="minmax").dtype.name == "int8"

    def test_the_benchmark_summary_is_not_empty(self):
        assert self.system().benchmark()

    def test_a_created_tensor_has_the_shape_and_dtype_asked_for(self):
        tensor = self.system().create_tensor((2, 5), "int8")
        assert tensor.shape == (2, 5) and tensor.parameters.dtype.name == "int8"

    def test_hints_name_dtypes_schemes_and_a_batch_size(self):
        hints = self.system().hints()
        assert hints.dtypes and hints.schemes and hints.batch_size > 0
