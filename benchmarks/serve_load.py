"""Concurrent streams against `bitwright serve`, over the loopback interface only.

    python benchmarks/serve_load.py model.gguf --streams 200 --seconds 120

Starts the server, keeps that many chat streams open for that time, and prints requests, errors,
tokens per second, seconds to the first token, and the server's resident memory over time. Exit
status 1 if there was an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

TOPICS = "rivers bread clocks islands glass winter bridges maps seeds music".split()  # noqa: SIM905


def resident_mb(pid: int) -> float:
    """Resident memory of a process, as Linux reports it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def stream(client: httpx.AsyncClient, end: float, number: int, found: dict) -> None:
    """One request after the other until the time is over."""
    draw = random.Random(number)
    while time.monotonic() < end:
        body = {
            "messages": [{"role": "user", "content": f"Tell me about {draw.choice(TOPICS)}."}],
            "max_tokens": found["tokens"],
            "temperature": 1.0,
            "seed": draw.randrange(1 << 30),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first, is_done = time.monotonic(), None, False
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"status {response.status_code}: {await response.aread()!r}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        is_done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise RuntimeError(event["error"]["message"])
                        if first is None and event["choices"][0]["delta"].get("content"):
                            first = time.monotonic() - begin
                        if event.get("usage"):
                            found["generated"] += event["usage"]["completion_tokens"]
                            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                            found["cached"] += cached
            if not is_done:
                raise RuntimeError("the stream ended early")
            found["requests"] += 1
            found["first"].append(first or time.monotonic() - begin)
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}"[:200])


async def load(address: str, pid: int, options: argparse.Namespace) -> dict:
    found = {"requests": 0, "generated": 0, "cached": 0, "errors": [], "first": [], "memory": []}
    found["tokens"] = options.tokens
    limits = httpx.Limits(max_connections=options.streams)
    timeout = httpx.Timeout(options.seconds + 300)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=timeout) as client:
        end = time.monotonic() + options.seconds
        tasks = [
            asyncio.create_task(stream(client, end, number, found))
            for number in range(options.streams)
        ]
        while not all(task.done() for task in tasks):
            found["memory"].append(resident_mb(pid))
            await asyncio.sleep(max(1, options.seconds / 20))
        await asyncio.gather(*tasks)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    command = [sys.executable, "-m", "bitwright", "serve", options.model, "--port", "0"]
    for name in ("slots", "context", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        address = re.search(r"http://\S+", line)[0]
        begin = time.monotonic()
        found = asyncio.run(load(address, server.pid, options))
        seconds = time.monotonic() - begin
    finally:
        server.terminate()
        status = server.wait(60)
    first = sorted(found["first"]) or [0.0]
    memory = found["memory"]
    print(f"{options.streams} streams, {seconds:.0f} s, {options.slots} slots")
    print(f"{found['requests']} requests, {len(found['errors'])} errors {found['errors'][:3]}")
    print(f"{found['generated'] / seconds:.1f} tokens/s, {found['cached']} prompt tokens reused")
    print(f"first token: median {statistics.median(first):.2f} s, largest {first[-1]:.2f} s")
    print(f"memory MB: {' '.join(f'{value:.0f}' for value in memory)}")
    print(f"exit status of the server after SIGTERM: {status}")
    return int(bool(found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
