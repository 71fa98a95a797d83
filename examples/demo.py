"""`make demo`: compiles the demo model and counts what it gets right on held-out images."""

import time

import bitwright as bw
from bitwright import demo


def main() -> None:
    exe = bw.compile(bw.load(demo.model_path()))
    inputs, labels = demo.held_out()
    start = time.perf_counter()
    logits = exe.run(inputs)["logits"]
    seconds = time.perf_counter() - start
    right = int((logits.argmax(1) == labels).sum())
    print(f"{right} of {len(labels)} held-out images right ({right / len(labels):.1%})")
    print(f"{seconds:.2f} s, compiled for this processor")


if __name__ == "__main__":
    main()
