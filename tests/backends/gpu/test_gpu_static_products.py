"""What the compiler makes of products for capability 9.0 and 8.0, without a GPU."""

import pytest
from static_report import static_report

pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return static_report("static_products.py", tmp_path_factory)


@pytest.mark.parametrize(
    "kernel, instructions",
    [
        ("int8 on sm_90: matmul_i8_tma", {"wgmma", "tma", "chained"}),
        ("int8 on sm_80: matmul_i8", {"mma", "cp_async"}),
        ("bf16 on sm_90: matmul_bf16_tma", {"wgmma", "tma"}),
        ("int4 row on sm_90: dequant_matmul_i4_row", {"v4_loads"}),
        ("int4 rows on sm_90: dequant_matmul_i4_tiles", {"wgmma", "cp_async"}),
        ("int8 convolution on sm_90: conv_i8_tma", {"wgmma", "tma"}),
    ],
)
def test_the_static_choice_uses_the_units_and_does_not_spill(reports, kernel, instructions):
    report = reports[kernel]
    assert instructions <= set(report["instructions"])
    assert report["spills"] == 0


def test_kernels_are_chained_from_capability_9_on(reports):
    for kernel, report in reports.items():
        assert ("chained" in report["instructions"]) == ("sm_90" in kernel), kernel
