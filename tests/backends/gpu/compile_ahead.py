"""Compiles kernels for a GPU that is not there: registers, spills, shared memory, instructions.

python compile_ahead.py FILE     each line of FILE is a pickled (name, capability, source, config)

Runs in a process of its own, because Triton's interpreter, which other tests use, cannot compile.
`compiled_facts` starts it.
"""

import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path

INSTRUCTIONS = (
    "IGMMA",
    "QGMMA",
    "HGMMA",
    "IMMA",
    "HMMA",
    "DMMA",
    "IDP",
    "UTMALDG",
    "LDGSTS",
    "LDG",
    "STG",
)


def compiled_facts(cases):
    """Facts of every case (name, capability, source, config), by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases"
        file.write_bytes(pickle.dumps([(n, c, facts_of(s), k) for n, c, s, k in cases]))
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, __file__, str(file)],
            check=False,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def facts_of(source):
    """What the other process needs of a source; its grid is a function and stays here."""
    return {
        "text": source.module(native=True),
        "pointers": {name: str(dtype) for name, dtype in source.pointers.items()},
        "sizes": source.sizes,
        "descriptors": dict(source.descriptors),
        "contracts": source.contracts,
    }


def compile_one(capability, facts, config):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from bitwright.backends.gpu.codegen.load import load_kernel
    from bitwright.backends.gpu.codegen.types import signature_type
    from bitwright.ir.dtype import dtype

    function = load_kernel(facts["text"])
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        if name in facts["pointers"]:
            element = signature_type(dtype(facts["pointers"][name]))
            if name in facts["descriptors"]:
                block = [config.constants.get(b, b) for b in facts["descriptors"][name].block]
                signature[name] = f"tensordesc<{element}[{','.join(map(str, block))}]>"
            else:
                signature[name] = f"*{element}"
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif name in config.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "i32"
            if name not in ("M",):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, dict(config.constants), attributes)
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": facts["contracts"],
    }
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "shared": made.metadata.shared,
        "ptx": made.asm["ptx"],
        **binary_facts(made.asm["cubin"]),
    }


def binary_facts(cubin):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda *options: (
            subprocess.run(
                [tool, *options, file.name], capture_output=True, text=True, check=True
            ).stdout
        )
        usage, sass = run("-res-usage"), run("-sass")
    counts = {name: len(re.findall(rf"\b{name}\b", sass)) for name in (*INSTRUCTIONS, "STL", "LDL")}
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "counts": {k: v for k, v in counts.items() if v},
    }


def main(path):
    found = {}
    for name, capability, facts, config in pickle.loads(Path(path).read_bytes()):
        with contextlib.redirect_stdout(sys.stderr):
            found[name] = compile_one(capability, facts, config)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
