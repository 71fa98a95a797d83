"""Runs every model of a folder on its inputs with one engine, in an emulated process.

python child.py FOLDER bitwright|onnxruntime
"""

import sys
from pathlib import Path

import numpy as np


def main(folder: Path, engine: str) -> None:
    for path in sorted(folder.glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as held:
            feeds = dict(held)
        outputs = run_here(path, feeds) if engine == "bitwright" else run_there(path, feeds)
        np.savez(folder / f"{path.stem}.{engine}.npz", *outputs)


def run_here(path, feeds):
    import bitwright as bw

    return list(bw.compile(path, threads=2).run(feeds).values())


def run_there(path, feeds):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
