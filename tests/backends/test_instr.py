"""Each instruction exists in LLVM under its name, and equals its numpy meaning lane by lane."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from emitted import Compiled, instructions

from bitwright.backends.cpu.codegen import instr
from bitwright.backends.cpu.codegen.emit import Module, Signature, bf16, f32, i8, i16, i32
from bitwright.errors import CompileError
from bitwright.target import host, named

NUMPY = {i8: np.int8, i16: np.int16, i32: np.int32, f32: np.float32, bf16: ml_dtypes.bfloat16}
IDS = [f"{one.mnemonic}-{one.result.lanes}-{one.needs[0]}" for one in instr.ALL]


def module_of(instruction, target):
    module = Module(target)
    names = [f"x{number}" for number in range(len(instruction.operands))]
    with module.kernel("kernel", Signature((*names, "y"))) as f:
        values = [
            f.load(type_, f.args.pointer(name))
            for name, type_ in zip(names, instruction.operands, strict=True)
        ]
        f.store(instruction(f, *values), f.args.pointer("y"))
    return module


def with_features(instruction):
    """A target that has the instruction, whether or not this machine does."""
    base = named("aarch64" if "aarch64" in instruction.llvm_name else "avx512")
    features = base.features | set(instruction.needs)
    text = ",".join(f"+{feature}" for feature in sorted(features))
    return replace(base, features=features, llvm_features=text)


@pytest.mark.parametrize("instruction", instr.ALL, ids=IDS)
def test_llvm_emits_the_instruction(instruction):
    found = instructions(module_of(instruction, with_features(instruction)))
    assert any(instruction.mnemonic in line for line in found)


def operands(instruction, seed):
    """Random lanes that include the extremes, or only extremes."""
    rng = np.random.default_rng(seed)
    for type_ in instruction.operands:
        kind = NUMPY[type_.scalar]
        if type_.is_float:
            yield rng.normal(size=type_.lanes).astype(kind)
            continue
        info = np.iinfo(kind)
        low, high = (info.min, info.max) if type_.scalar is not i32 else (-(2**30), 2**30)
        numbers = rng.integers(low, high, type_.lanes, dtype=kind, endpoint=True)
        edge = rng.choice(np.array([low, high, 0, -1], kind), type_.lanes)
        yield np.where(rng.random(type_.lanes) < (1.0 if seed == 0 else 0.2), edge, numbers)


@pytest.mark.parametrize("instruction", instr.ALL, ids=IDS)
def test_meaning_lane_by_lane(instruction):
    if not host().has(*instruction.needs):
        pytest.skip(f"this machine has no {', '.join(instruction.needs)}")
    call, kind = Compiled(module_of(instruction, host())), NUMPY[instruction.result.scalar]
    for seed in range(50):
        values = list(operands(instruction, seed))
        y = np.zeros(instruction.result.lanes, kind)
        call(**{f"x{number}": value for number, value in enumerate(values)}, y=y)
        wide = [v.astype(np.float32) if v.dtype == ml_dtypes.bfloat16 else v for v in values]
        np.testing.assert_array_equal(y, instruction.meaning(*wide))


def test_choice_follows_the_target():
    assert instr.dot_u8s8(named("avx512vnni")).mnemonic == "vpdpbusd"
    assert instr.dot_u8s8(named("avx2")) is None
    assert instr.pairs_u8s8(named("avx2")).result.lanes == 16
    assert instr.dot_s8s8(named("aarch64")).mnemonic == "sdot"
    assert instr.dot_bf16(named("avx512")) is None
    assert instr.dot_s16s16(named("avx512vnni")).operands[1].lanes == 32
    assert instr.pairs_s16s16(named("sse2")).result.lanes == 4
    assert instr.pairs_u8s8(named("sse2")) is None


def test_an_instruction_the_target_lacks_is_refused():
    with pytest.raises(CompileError, match="vpdpbusd does not exist on sse2"):
        module_of(instr.ALL[0], named("sse2"))
