"""The kernel and the instruction of each type, as compiled for many targets."""

import pytest

from bitwright import target
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.profile.product_loops import (
    loop_instructions,
    product_instruction,
    product_loops,
)
from bitwright.errors import BitwrightError
from bitwright.machine.probes import TYPES, probe, type_name
from bitwright.machine.selection import select
from bitwright.pipeline import compile_graph

EXPECTED = {
    ("amx", "uint8"): ("matmul_u8s8s32_amx", "tdpbusd"),
    ("amx", "int8"): ("matmul_s8s8s32_amx", "tdpbssd"),
    ("amx", "bf16"): ("matmul_bf16_amx", "tdpbf16ps"),
    ("avx512bf16", "bf16"): ("matmul_bf16_avx512bf16", "vdpbf16ps"),
    ("avx512vnni", "uint8"): ("matmul_u8s8s32_vnni", "vpdpbusd"),
    ("avx512", "bf16"): ("matmul_bf16", "vfmadd231ps"),
    ("avx2", "f32"): ("matmul_f32", "vfmadd231ps"),
    ("avx2", "f64"): ("batched_matmul_f64", "vfmadd231pd"),
    ("avx2", "uint8"): ("matmul_u8s8s32_pmaddubsw", "vpmaddubsw"),
    ("avx2", "int4"): ("dequant_matmul_f32_s4", "vfmadd231ps"),
    ("sse2", "uint8"): ("matmul_s16s16s32_pmaddwd", "pmaddwd"),
    ("sse2", "f32"): ("matmul_f32", "mulps"),
}
NOT_ACCELERATED = {("avx512", "bf16"), ("avx2", "int4"), ("sse2", "f32")}


@pytest.mark.parametrize("name, dtype", EXPECTED, ids=lambda text: text)
def test_kernel_and_instruction(name, dtype):
    found = select(dtype, target.named(name))
    assert (found.kernel, found.instruction) == EXPECTED[name, dtype]
    assert found.is_accelerated == ((name, dtype) not in NOT_ACCELERATED)
    assert found.loop in product_loops(target.named(name))


def test_reasons():
    reason = lambda dtype, name: select(dtype, target.named(name)).reason
    assert reason("bf16", "avx2").endswith("the target has no avx512bf16 or amx-bf16")
    assert "vfmadd231ph is not used" in reason("f16", "avx512fp16")
    assert "widened to 16 bits" in reason("int8", "sse2")
    assert reason("int4", "avx2").startswith("weights are dequantized in the kernel")
    assert "no fused multiply-add" in reason("f32", "sse2")


def test_the_text_is_what_runs():
    """The program's object code of the kernel is the compiled text of the selection."""
    host = target.host()
    for dtype in ("f32", "uint8"):
        found = select(dtype, host)
        kernels = compile_graph(probe(dtype).graph, threads=1).engine.kernels
        assert kernels[found.name].code == jit.compile_object(found.text, host)


def test_every_type_has_a_selection():
    for dtype in TYPES:
        found = select(dtype, target.host())
        assert found.kernel and found.instruction and found.reason


def test_instructions_in_assembly():
    lines = "\n".join(
        ["\tvpdpbusd\t%zmm0, %zmm1, %zmm2"] + ["\tvmulps %zmm0, %zmm1, %zmm2"] * 3 + ["\tret"]
    )
    assert product_instruction(lines) == "vpdpbusd"
    assert product_instruction("\tvfmadd213ps a\n\tvfmadd132ps b\n\tvmulps c") == "vfmadd231ps"
    assert product_instruction("\tvpmaddwd a\n\tvpmaddubsw b") == "vpmaddubsw"
    assert product_instruction("\t{vex}\tvpdpbusd a") == "vpdpbusd"
    assert product_instruction("vpdpbusd:\n\tret") == ""
    assert loop_instructions(target.named("amx"))["int8_tiles"] == "tdpbusd"
    assert loop_instructions(target.named("aarch64"))["int8"] == "sdot"


def test_names_of_types():
    assert [type_name(name) for name in ("i8", "u4", "int8", "bf16")] == [
        "int8", "uint4", "int8", "bf16",
    ]  # fmt: skip
    with pytest.raises(BitwrightError, match="no product of this type"):
        type_name("c64")
