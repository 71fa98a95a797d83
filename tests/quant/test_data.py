"""Every kind of data source, and errors for data that does not fit."""

import numpy as np
import pytest
from small_models import branches, perceptron

import bitwright as bw
from bitwright.errors import CalibrationError
from bitwright.quant import Batches

ROWS = [np.full((2, 8), i, np.float32) for i in range(4)]


class Reader:
    def __init__(self):
        self.items = iter([{"x": row} for row in ROWS])

    def get_next(self):
        return next(self.items, None)


def values(data, **options):
    return [batch["x"][0, 0] for batch in Batches(data, perceptron(), **options)]


@pytest.mark.parametrize(
    "data",
    [
        [{"x": row} for row in ROWS],
        ROWS,
        [(row,) for row in ROWS],
        [(row, "label") for row in ROWS],
        np.stack(ROWS),
        Reader(),
        iter(ROWS),
        lambda: (row for row in ROWS),
    ],
    ids=["dicts", "arrays", "tuples", "labels", "array", "reader", "iterator", "function"],
)
def test_sources(data):
    assert values(data) == [0, 1, 2, 3]


def test_one_batch_alone():
    assert values(ROWS[1]) == [1]
    assert values({"x": ROWS[1]}) == [1]


def test_a_torch_data_loader():
    torch = pytest.importorskip("torch")
    rows = torch.arange(4.0)[:, None].expand(4, 8)
    dataset = torch.utils.data.TensorDataset(rows, torch.arange(4))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    assert values(loader) == [0, 2]
    assert values(loader, transform=lambda item: {"x": item[0] + 1}) == [1, 3]


def test_tensors_of_bfloat16():
    torch = pytest.importorskip("torch")
    found = list(Batches([torch.ones(1, 8, dtype=torch.bfloat16)], perceptron("bf16")))
    assert found[0]["x"].dtype.name == "bfloat16"


def test_a_folder(tmp_path):
    for i, row in enumerate(ROWS):
        if i % 2:
            np.save(tmp_path / f"{i}.npy", row)
        else:
            np.savez(tmp_path / f"{i}.npz", x=row)
    (tmp_path / "readme.txt").write_text("no data")
    assert values(tmp_path) == values(str(tmp_path)) == [0, 1, 2, 3]
    assert values(tmp_path / "2.npz") == [2]


def test_transform_comes_first():
    assert values(range(3), transform=lambda i: ROWS[i] * 2) == [0, 2, 4]


def test_a_subset_is_spread_evenly_where_there_is_a_length():
    assert values(ROWS, subset=2) == [0, 2]
    assert values(iter(ROWS), subset=2) == [0, 1]
    assert values(ROWS, subset=9) == [0, 1, 2, 3]
    assert len(Batches(ROWS, perceptron(), subset=2)) == 2
    with pytest.raises(CalibrationError, match="at least one"):
        Batches(ROWS, perceptron(), subset=0)


def test_repeatable_sources_start_over():
    again = Batches(ROWS, perceptron())
    assert again.is_repeatable and len(list(again)) == len(list(again)) == 4
    once = Batches(iter(ROWS), perceptron())
    assert not once.is_repeatable and once.known_length is None
    list(once)
    with pytest.raises(CalibrationError, match=r"empty.*once"):
        list(once)


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "the data is empty"),
        (3, "not a data source.*found int"),
        ([{"y": ROWS[0]}], "batch 0 of the data: .*input 'x' is missing"),
        ([ROWS[0], {"z": ROWS[0]}], "batch 1 of the data: .*input 'x' is missing"),
        ([ROWS[0].astype(np.float64)], "wrong element type.*expected f32"),
        ([ROWS[0][:, :7]], "wrong size on axis 1"),
        ([ROWS[0][0]], r"wrong rank.*batch axis of 'x' missing\? Pass array\[None\]"),
        ([None], "too few arrays"),
        ([()], r"too few arrays.*expected 1 \(x\)"),
    ],
)
def test_data_that_does_not_fit(data, message):
    with pytest.raises(CalibrationError, match=message):
        list(Batches(data, perceptron()))


def test_folders_that_cannot_be_read(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(CalibrationError, match=r"no \.npz"):
        list(Batches(folder, perceptron()))
    with pytest.raises(CalibrationError, match="there is no data"):
        list(Batches(tmp_path / "nothing", perceptron()))
    np.save(tmp_path / "secret.npy", ROWS[0])
    (folder / "link.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(CalibrationError, match=r"link\.npy points outside"):
        list(Batches(folder, perceptron()))
    (folder / "link.npy").unlink()
    np.save(folder / "a.npy", ROWS[0])
    with pytest.raises(CalibrationError, match="the model has 2 inputs"):
        list(Batches(folder, branches()))


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_damaged_and_pickled_files_are_refused(tmp_path, name):
    objects = np.array([{"a": 1}], dtype=object)
    if name.endswith("y"):
        np.save(tmp_path / name, objects)
    else:
        np.savez(tmp_path / name, x=objects)
    for data in (None, b"", b"PK\x03\x04 no zip", (tmp_path / name).read_bytes()[:40]):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(CalibrationError, match=f"cannot read {name}"):
            list(Batches(tmp_path, perceptron()))


def test_zero_samples_are_an_error_whoever_reads_them():
    from bitwright.report.compare import compare

    graph, empty = perceptron(), {"x": np.zeros((0, 8), np.float32)}
    for read in (bw.calibrate, lambda g, data: compare(g, g, data)):
        with pytest.raises(CalibrationError, match="the data has no samples; expected a batch"):
            read(graph, [empty, empty])
    some = {"x": np.ones((1, 8), np.float32)}
    assert bw.calibrate(graph, [empty, some]).batches == 2
