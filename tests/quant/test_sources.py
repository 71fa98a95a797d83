"""Batches from arrays, tables and images, and notes on ignored data."""

import numpy as np
import pytest
from small_models import branches, perceptron

import bitwright as bw
from bitwright import demo
from bitwright.errors import CalibrationError
from bitwright.quant import Batches
from bitwright.quant.data.images import Images
from bitwright.quant.data.sources import Folder
from bitwright.report.compare import compare
from bitwright.warn import DataWarning


def model(type_, *more):
    b = bw.Builder("m")
    x = b.input("x", type_)
    others = [b.input(f"x{i}", other) for i, other in enumerate(more)]
    return b.build(y=b.relu(x, name="y"), **{f"y{i}": b.identity(v) for i, v in enumerate(others)})


def found(data, graph, **options):
    batches = Batches(data, graph, **options)
    return [batch["x"] for batch in batches], batches.notes()


SAMPLES = np.arange(100 * 8, dtype=np.float32).reshape(100, 8)


# keys that are no inputs


def test_keys_that_are_not_inputs_are_ignored_with_a_note(tmp_path):
    data = [{"x": SAMPLES[:4], "labels": np.zeros(4), "idx": 3}, {"x": SAMPLES[4:6]}]
    arrays, notes = found(data, perceptron())
    assert [len(a) for a in arrays] == [4, 2]
    assert notes == ["the data holds 'labels', 'idx', which are not inputs of the model: ignored"]
    assert notes[0] in bw.calibrate(perceptron(), data).notes()
    with pytest.warns(DataWarning, match="labels"):
        quantized = bw.quantize(perceptron(), data, recipe="w8")
    assert notes[0] in quantized.report.notes
    with pytest.warns(DataWarning, match="labels"):
        compare(perceptron(), quantized, data)
    np.savez(tmp_path / "a.npz", x=SAMPLES[:4], labels=np.zeros(4))
    assert "'labels'" in found(tmp_path, perceptron())[1][0]


def test_an_input_that_is_missing_is_still_named():
    with pytest.raises(CalibrationError, match="input 'x' is missing"):
        found([{"X": SAMPLES}], perceptron())


# many samples in one array


@pytest.mark.parametrize("kind", ["array", "dict", "npy", "npz", "folder"])
def test_one_array_of_samples_is_split_into_batches(tmp_path, kind):
    np.save(tmp_path / "x.npy", SAMPLES)
    np.savez(tmp_path / "x.npz", x=SAMPLES, labels=np.arange(100))
    data = {
        "array": SAMPLES,
        "dict": {"x": SAMPLES},
        "npy": tmp_path / "x.npy",
        "npz": tmp_path / "x.npz",
        "folder": Folder(tmp_path / "x.npy", batch_size=30),
    }[kind]
    arrays, _ = found(data, perceptron())
    assert [len(a) for a in arrays] == ([30, 30, 30, 10] if kind == "folder" else [32, 32, 32, 4])
    np.testing.assert_array_equal(np.concatenate(arrays), SAMPLES)
    assert all(a.flags.owndata for a in arrays)


def test_sizes_subsets_and_lengths_of_split_samples():
    assert [len(a) for a in found(SAMPLES, perceptron(), batch_size=50)[0]] == [50, 50]
    assert len(Batches(SAMPLES, perceptron())) == 4
    arrays, _ = found(SAMPLES, perceptron(), subset=2)
    assert [a[0, 0] for a in arrays] == [0, 64 * 8]
    assert bw.calibrate(perceptron(), SAMPLES).batches == 4
    with pytest.raises(CalibrationError, match="at least one sample"):
        found(SAMPLES, perceptron(), batch_size=0)


def test_a_sequence_axis_is_not_a_batch_axis():
    for name in ("seq", "tokens", "past_length", "time"):
        assert [len(a) for a in found(SAMPLES, model(f"f32[{name}, 8]"))[0]] == [100]
    graph = model("f32[batch, 8]", "f32[other, 8]")
    assert [len(a) for a in found({"x": SAMPLES, "x0": SAMPLES}, graph)[0]] == [100]


# a model that fixes its batch size


@pytest.mark.parametrize(
    "data",
    [
        lambda: SAMPLES[:12],
        lambda: [SAMPLES[:12]],
        lambda: [{"x": SAMPLES[:12], "labels": np.zeros(12)}],
        lambda: [(SAMPLES[:8],), (SAMPLES[8:12],)],
        lambda: iter([SAMPLES[:12]]),
    ],
    ids=["array", "arrays", "dicts", "tuples", "iterator"],
)
@pytest.mark.parametrize("size", [1, 4])
def test_batches_are_split_to_the_fixed_batch_size(data, size):
    arrays, _ = found(data(), model(f"f32[{size}, 8]"))
    assert [len(a) for a in arrays] == [size] * (12 // size)
    np.testing.assert_array_equal(np.concatenate(arrays), SAMPLES[:12])


def test_an_incomplete_batch_is_dropped_with_a_note():
    loader = [SAMPLES[:10], SAMPLES[10:20], SAMPLES[20:23]]
    arrays, notes = found(loader, model("f32[4, 8]"))
    assert [a[0, 0] / 8 for a in arrays] == [0, 4, 10, 14]
    assert notes == ["7 samples do not fill a batch of the model's fixed size: ignored"]
    arrays, notes = found(SAMPLES, model("f32[32, 8]"))
    assert len(arrays) == 3 and notes[0].startswith("4 samples")


def test_inputs_are_split_together_and_others_are_shared():
    graph = model("f32[2, 8]", "i64[2]", "f32[3, 5]")
    table = np.ones((3, 5), np.float32)
    data = [{"x": SAMPLES[:6], "x0": np.arange(6), "x1": table}]
    batches = list(Batches(data, graph))
    assert [b["x0"].tolist() for b in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(b["x1"] is table for b in batches)


def test_the_number_of_batches_is_known_where_it_can_be():
    graph = model("f32[4, 8]")
    assert len(Batches([SAMPLES[:8]] * 3, graph)) == 6
    assert Batches([SAMPLES[:8]] * 3, graph, subset=5).known_length == 5
    assert len(list(Batches([SAMPLES[:8]] * 3, graph, subset=5))) == 5
    assert Batches(iter([SAMPLES[:8]]), graph).known_length is None


def test_a_batch_with_a_wrong_shape_is_an_error():
    for wrong in (SAMPLES[:3], SAMPLES[:8, :5]):
        with pytest.raises(CalibrationError, match="wrong size on axis"):
            found([wrong], model("f32[4, 8]"))


# tables


def written(path, text):
    path.write_text(text)
    return path


def test_a_table_without_a_header(tmp_path):
    rows = "\n".join(",".join(str(v) for v in row) for row in SAMPLES)
    arrays, notes = found(written(tmp_path / "a.csv", rows), perceptron())
    assert [len(a) for a in arrays] == [32, 32, 32, 4] and not notes
    np.testing.assert_array_equal(np.concatenate(arrays), SAMPLES)
    assert len(found(tmp_path, perceptron(), batch_size=100)[0]) == 1


@pytest.mark.parametrize(
    "header", ["x.0,label,x.1,x.2", "x_0,label,x_1,x_2", "x[1],label,x[2],x[3]"]
)
def test_columns_go_to_inputs_by_name(tmp_path, header):
    path = written(tmp_path / "a.csv", f"{header}\n1,cat,2,3\n\n4,dog,5,6\n")
    arrays, notes = found(path, model("f32[n, 3]"))
    assert arrays[0].tolist() == [[1, 2, 3], [4, 5, 6]] and arrays[0].dtype == np.float32
    assert notes == ["columns 'label' match no input: ignored"]


def test_columns_of_several_inputs_and_types(tmp_path):
    big = 2**60 + 1
    path = written(tmp_path / "a.csv", f"y,x0,x,x1\n1,{big},2.5,true\n2,3,1e-3,0\n")
    graph = model("f32[n]", "i64[n, 1]", "bool[n]")
    (batch,) = Batches(path, graph)
    assert batch["x0"].tolist() == [[big], [3]] and batch["x1"].tolist() == [True, False]
    assert batch["x"].tolist() == [2.5, np.float32(1e-3)]


def test_other_column_names_map_in_order(tmp_path):
    path = written(tmp_path / "a.csv", "age,height,weight\n1,2,3\n")
    assert found(path, model("f32[n, 3]"))[0][0].tolist() == [[1, 2, 3]]
    assert found(path, model("f32[n, 1, 3]"))[0][0].shape == (1, 1, 3)


def test_rows_of_a_table_fill_a_fixed_batch(tmp_path):
    path = written(tmp_path / "a.csv", "1,2\n" * 7)
    arrays, notes = found(path, model("f32[3, 2]"))
    assert [len(a) for a in arrays] == [3, 3] and notes[0].startswith("1 samples")


@pytest.mark.parametrize(
    "text, type_, message",
    [
        ("", "f32[n, 3]", "a.csv is empty"),
        ("1,2\n", "f32[n, 3]", r"expected 3 columns for x \(3\), found 2 columns"),
        ("1,2,3\n1,2\n", "f32[n, 3]", "a.csv, row 2: has the wrong number of columns"),
        ("1,2,3\n1,,3\n", "f32[n, 3]", "row 2: has no number in column 2; .*found ''"),
        ("1,2,3\n", "f32[n, m]", "a table cannot provide input 'x' with dynamic sizes"),
        ("1,2,3\n", "f32[]", "cannot provide samples of input 'x'"),
        (
            "1,2,3\n1,2,1e300\n",
            "f32[n, 3]",
            r"row 2: .*does not fit f32.*found 1e\+300",
        ),
        ("1,2,3\n1,300,3\n", "u8[n, 3]", "row 2: has a number that does not fit u8.*found 300"),
        ("1,2.5,3\n", "i64[n, 3]", r"row 1: .*does not fit i64.*found 2\.5"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, text, type_, message):
    with pytest.raises(CalibrationError, match=message):
        found(written(tmp_path / "a.csv", text), model(type_))


# images


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    (tmp_path / "cats").mkdir()
    for i, place in enumerate(("a.png", "b.png", "cats/c.PNG", "cats/d.png", "e.png")):
        pixels = np.full((6, 4, 3), (10 * i, 100, 200), np.uint8)
        image.fromarray(pixels).save(tmp_path / place)
    (tmp_path / "readme.txt").write_text("no image")
    return tmp_path


def test_a_folder_of_images_in_both_layouts(pictures):
    arrays, _ = found(pictures, model("f32[batch, 3, 6, 4]"))
    assert arrays[0].shape == (5, 3, 6, 4) and arrays[0].flags.c_contiguous
    np.testing.assert_allclose(arrays[0][:, 0, 0, 0] * 255, [0, 10, 20, 30, 40], rtol=1e-6)
    assert arrays[0][0, 2, 3, 3] == np.float32(200) / np.float32(255)
    last, _ = found(pictures, model("f32[batch, 6, 4, 3]"))
    np.testing.assert_array_equal(last[0], arrays[0].transpose(0, 2, 3, 1))
    asked, _ = found(Images(pictures, layout="nhwc"), model("f32[n, 3, 4, 3]"))
    assert asked[0].shape == (5, 3, 4, 3)


def test_images_are_normalized_resized_and_batched(pictures):
    images = Images(pictures, resize=(2, 5), mean=(0.5, 0, 0), std=(0.25, 1, 1), batch_size=2)
    arrays, _ = found(images, model("f32[batch, 3, h, w]"))
    assert [a.shape for a in arrays] == [(2, 3, 2, 5), (2, 3, 2, 5), (1, 3, 2, 5)]
    np.testing.assert_allclose(arrays[0][1, 0], (10 / 255 - 0.5) / 0.25, rtol=1e-5)
    np.testing.assert_allclose(arrays[0][1, 1], 100 / 255, rtol=1e-6)
    assert [a.shape for a in found(pictures, model("f32[n, 3, h, w]"))[0]] == [(1, 3, 6, 4)] * 5
    assert found(pictures, model("f32[2, 3, 6, 4]"))[1][0].startswith("1 samples")
    assert len(found(pictures, model("f32[batch, 3, 6, 4]"), subset=1)[0]) == 1


def test_other_channels_and_types(pictures):
    assert found(pictures, model("f32[n, 1, 6, 4]"))[0][0].shape == (5, 1, 6, 4)
    raw = found(pictures, model("u8[n, 6, 4, 4]"))[0][0]
    assert raw.dtype == np.uint8 and raw[1, 0, 0].tolist() == [10, 100, 200, 255]
    assert found(pictures, model("f16[n, 3, 6, 4]"))[0][0].dtype == np.float16
    assert [a.shape for a in found(pictures, model("f32[3, 6, 4]"))[0]] == [(3, 6, 4)] * 5
    assert found(pictures / "a.png", model("f32[n, 3, 6, 4]"))[0][0].shape == (1, 3, 6, 4)


@pytest.mark.parametrize(
    "type_, options, message",
    [
        ("f32[n, 8]", {}, "is not an image input"),
        ("i64[n, 3, 6, 4]", {}, "has no pixel type"),
        ("f32[n, 7, 6, 5]", {}, "an unsupported number of channels"),
        ("f32[n, 3, 6, 4]", {"resize": 8}, "another height than the resized images"),
        ("f32[n, 3, 6, 4]", {"mean": (1, 2)}, "wrong number of channels; expected 3, found 2"),
        ("f32[n, 3, 6, 4]", {"std": 0}, "std is not positive"),
        ("u8[n, 3, 6, 4]", {"mean": 0.5}, "mean is for floating inputs"),
        ("f32[n, 3, 6, 4]", {"layout": "hwc"}, "unknown layout"),
        ("f32[n, 3, 6, 4]", {"resize": (1, 2, 3)}, "invalid image size"),
    ],
)
def test_images_that_do_not_fit(pictures, type_, options, message):
    with pytest.raises(CalibrationError, match=message):
        found(Images(pictures, **options), model(type_))


def test_damaged_and_missing_images(pictures, tmp_path):
    (pictures / "f.jpg").write_bytes(b"no image")
    with pytest.raises(CalibrationError, match=r"cannot read the image f\.jpg"):
        found(pictures, model("f32[n, 3, 6, 4]"))
    with pytest.raises(CalibrationError, match="one input, and the model has 2"):
        found(Images(pictures), branches())
    with pytest.raises(CalibrationError, match="there is no data"):
        found(Images(tmp_path / "nothing"), model("f32[n, 3, 6, 4]"))


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(CalibrationError, match=r"pip install bitwright\[images\]"):
        found(tmp_path, model("f32[n, 3, 6, 4]"))


def test_a_model_is_quantized_with_images(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    inputs, labels = demo.held_out()
    pixels = np.concatenate([next(iter(batch.values())) for batch in demo.calibration()])
    for i, one in enumerate(pixels[:70]):
        image.fromarray(np.rint(one[0] * 255).astype(np.uint8)).save(tmp_path / f"{i:03}.png")
    quantized = bw.quantize(demo.model_path(), tmp_path)
    logits = bw.compile(quantized).run(inputs)["logits"]
    assert (logits.argmax(1) == labels).mean() > 0.98
