"""The CUDA device that kernels run on, or Triton's interpreter on CPU tensors.

`current_device()` raises a clear error if torch, triton, the driver or a device is missing, or if
the device is too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from bitwright.backends.gpu.codegen.load import interpreted
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.requirements import LOWEST_CAPABILITY, load_torch, load_triton
from bitwright.errors import BitwrightError


@dataclass(frozen=True)
class Device:
    torch_device: Any
    machine: Machine

    @property
    def is_interpreted(self) -> bool:
        return self.machine.interpreted

    def synchronize(self) -> None:
        if not self.is_interpreted:
            load_torch().cuda.synchronize(self.torch_device)

    def synchronize_stream(self) -> None:
        """Wait for what is on the current stream."""
        if not self.is_interpreted:
            load_torch().cuda.current_stream(self.torch_device).synchronize()


@cache
def current_device() -> Device:
    """The current CUDA device of torch; the interpreter if TRITON_INTERPRET=1."""
    torch = load_torch()
    load_triton()
    if interpreted():
        return Device(torch.device("cpu"), Machine())
    if not torch.backends.cuda.is_built():
        raise BitwrightError(
            "target 'cuda' needs PyTorch with CUDA",
            found=f"torch {torch.__version__}",
            hint="Install a CUDA build of torch; TRITON_INTERPRET=1 tries kernels without a GPU.",
        )
    if not torch.cuda.is_available():
        raise BitwrightError(
            "target 'cuda' finds no GPU",
            found=_why_not_available(),
            hint="`bitwright hardware` shows what was found.",
        )
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)
    if capability < LOWEST_CAPABILITY:
        raise BitwrightError(
            f"the GPU {facts.name} is too old",
            expected=f"compute capability {LOWEST_CAPABILITY[0]}.{LOWEST_CAPABILITY[1]} or higher",
            found=f"{facts.major}.{facts.minor}",
        )
    machine = Machine(
        facts.name,
        capability,
        facts.multi_processor_count,
        int(getattr(facts, "shared_memory_per_block_optin", 99 << 10)),
        int(getattr(facts, "L2_cache_size", 50 << 20)),
        interpreted=False,
    )
    return Device(torch.device("cuda", index), machine)


def _why_not_available() -> str:
    """What torch says when it looks for a device."""
    try:
        load_torch().cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n", maxsplit=1)[0]
    return "no device"
