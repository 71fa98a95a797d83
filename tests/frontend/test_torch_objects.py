"""PyTorch modules, programs, tensors and files where a model, data or inputs are expected."""

import warnings

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import CalibrationError, ImportModelError
from bitwright.quant import Ranges
from bitwright.report.compare import compare
from bitwright.warn import BitwrightWarning

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


class Small(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, scale=None):
        y = self.last(self.drop(torch.relu(self.first(x))))
        return y if scale is None else y * scale


class Attends(nn.Module):
    """Attention with labels, as in transformers, and sequences of any length."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, mask=None, labels=None):
        h = self.table(ids)
        if mask is not None:
            h = h * mask[..., None]
        scores = self.head(h.mean(1))
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Small().eval()


def rows(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for size in sizes]


# modules


@pytest.mark.parametrize(
    "data",
    [
        lambda: rows(3, 5, 2, 4, 6),
        lambda: [(x, torch.zeros(len(x))) for x in rows(3, 5, 2)],
        lambda: [{"x": x, "labels": torch.zeros(len(x))} for x in rows(3, 5, 2)],
        lambda: iter(rows(1, 1, 7, 3, 2)),
        lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.cat(rows(9)), torch.zeros(9)), batch_size=4
        ),
        lambda: rows(40)[0].numpy(),
        lambda: lambda: iter(rows(3, 2)),
    ],
    ids=["tensors", "tuples", "dicts", "iterator", "loader", "array", "function"],
)
@pytest.mark.filterwarnings("ignore::bitwright.warn.DataWarning")
def test_a_module_is_quantized_with_its_data_as_examples(module, data):
    quantized = bw.quantize(module, data())
    assert str(quantized.graph.inputs[0].type) == "f32[batch, 8]"
    x = rows(11)[0]
    found = bw.compile(quantized).run({"x": x})["output"]
    expected = module(x).detach().numpy()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_no_batch_of_an_iterator_is_lost(module):
    data = rows(3, 5, 2, 4, 6, 1)
    assert bw.calibrate(module, iter(data)).batches == 6
    ranges = bw.calibrate(module, iter(data))
    assert isinstance(ranges, Ranges) and ranges["x"].count == sum(map(torch.numel, data))


def test_convert_and_compare_take_modules(module):
    data = rows(3, 4)
    converted = bw.convert(module, "f16", data)
    found = compare(module, converted, data)
    assert found.outputs["output"].sqnr_db > 40


def test_sizes_that_differ_in_the_data_stay_free_and_labels_are_left_out():
    torch.manual_seed(0)
    module = Attends().eval()
    data = [
        {
            "ids": torch.randint(50, (2, n)),
            "mask": torch.ones(2, n),
            "labels": torch.zeros(2).long(),
        }
        for n in (5, 7, 9)
    ]
    ranges = bw.calibrate(module, data)
    assert ranges.batches == 3 and any("'labels'" in note for note in ranges.notes())


def test_a_module_with_a_fixed_batch_gets_batches_of_it():
    class Fixed(nn.Module):
        def forward(self, x):
            return torch.relu(x.reshape(2, 8) + 1)

    assert bw.calibrate(Fixed().eval(), rows(2, 4, 2)).batches == 4


def test_a_module_without_examples_is_refused_with_a_hint(module):
    for call in (bw.compile, bw.load, bw.bench):
        with pytest.raises(
            ImportModelError, match=r"found Small.*bw\.from_torch\(module, \(x,\)\)"
        ):
            call(module)
    with pytest.raises(CalibrationError, match="the data is empty"):
        bw.quantize(module, [])


def test_a_module_with_examples_of_its_own_is_compiled(module):
    module.example_input_array = torch.zeros(1, 8)
    x = rows(5)[0]
    found = bw.compile(module).run({"x": x})["output"]
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_an_exported_program_is_a_model(module):
    program = torch.export.export(module, (torch.zeros(3, 8),))
    x = rows(3)[0]
    for exe in (bw.compile(program), bw.compile(bw.load(program))):
        found = exe.run({"x": x})["output"]
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


# training mode


def test_a_module_in_training_mode_is_warned_of(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitwrightWarning)
        bw.from_torch(module, (torch.zeros(2, 8),))
    module.train()
    with pytest.warns(BitwrightWarning, match=r"in training mode \(drop\): call module\.eval\(\)"):
        bw.from_torch(module, (torch.zeros(2, 8),))
    with pytest.warns(BitwrightWarning, match="in training mode"):
        bw.calibrate(module, rows(2, 3))
    with pytest.warns(BitwrightWarning, match=r"\(the module\)"):
        bw.from_torch(nn.Linear(8, 2), (torch.zeros(2, 8),))


def test_one_part_in_training_mode_is_enough(module):
    module.drop.train()
    with pytest.warns(BitwrightWarning, match=r"training mode \(drop\)"):
        bw.from_torch(module, (torch.zeros(2, 8),))


# tensors as inputs


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "i64", "u8", "bool"])
def test_tensors_are_inputs(target, element):
    b = bw.Builder("m")
    x = b.input("x", f"{element}[n, 4]")
    graph = b.build(y=b.identity(x))
    kinds = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "u8": "uint8"}
    x = torch.arange(12).reshape(4, 3).T.to(getattr(torch, kinds.get(element, element)))
    exe = bw.compile(graph, target=target)
    for given in (x, x.requires_grad_() if x.is_floating_point() else x):
        for found in (exe.run({"x": given}), exe.run(given), exe(x=given)):
            assert found["y"].dtype == bw.dtype(element).numpy
            assert found["y"].astype(np.float64).tolist() == x.detach().double().tolist()


def test_a_sparse_tensor_is_a_bitwright_error():
    b = bw.Builder("m")
    graph = b.build(y=b.relu(b.input("x", "f32[2, 2]")))
    with pytest.raises(bw.BitwrightError, match="not dense"):
        bw.compile(graph).run({"x": torch.eye(2).to_sparse()})


def test_observers_and_tensors(module):
    x = rows(4)[0].requires_grad_()
    assert bw.Observer().add(x).statistics.count == x.numel()
    assert bw.quantize_tensor(x, "int8").shape == (4, 8)


# files


def test_pytorch_files_are_refused_with_a_hint(module, tmp_path):
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    torch.save(module.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(module, tmp_path / "whole.bin")
    torch.export.save(torch.export.export(module, (torch.zeros(1, 8),)), tmp_path / "program.pt2")
    np.savez(tmp_path / "arrays.npz", x=np.zeros(3))
    (tmp_path / "w.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    expected = {
        "weights.pt": "holds weights or pickled objects",
        "old.pth": "a pickle",
        "whole.bin": "holds weights or pickled objects",
        "program.pt2": r"bw\.load\(torch\.export\.load\('program\.pt2'\)\)",
        "arrays.npz": "an archive of arrays",
        "w.safetensors": r"weights without a graph.*bw\.load_parameters",
    }
    for name, message in expected.items():
        for call in (bw.load, bw.compile, lambda path: bw.quantize(path, rows(2))):
            with pytest.raises(ImportModelError, match=message):
                call(tmp_path / name)
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert bw.load(loaded).inputs[0].name == "x"


def test_a_folder_of_tensors_is_refused_with_a_hint(module, tmp_path):
    torch.save(rows(2)[0], tmp_path / "a.pt")
    graph = bw.from_torch(module, (torch.zeros(2, 8),))
    with pytest.raises(CalibrationError, match=r"numpy\.savez"):
        bw.calibrate(graph, tmp_path)
