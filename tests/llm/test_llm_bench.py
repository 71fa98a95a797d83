"""`bench-llm`: what it measures, with a small decoder; no time is asserted."""

import json

import pytest
from click.testing import CliRunner
from tiny_decoder import TinyModel

from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.report.llm_bench import bench_llm


def test_every_case_has_a_row():
    sizes = {"contexts": (8, 20), "batches": (1, 2), "threads": (1, 2)}
    report = bench_llm(TinyModel(), **sizes, rounds=2, peers=(), prompt=9, decoded=3)
    assert [(r.threads, r.what, r.context, r.batch) for r in report.rows] == [
        (threads, *case)
        for threads in (1, 2)
        for case in [
            ("prefill", 9, 1),
            ("decode", 8, 1),
            ("decode", 20, 1),
            ("decode", 8, 2),
            ("decode", 20, 2),
        ]
    ]
    decoded = [row for row in report.rows if row.what == "decode"]
    assert all(row.tokens_per_second > 0 and row.bandwidth_share > 0 for row in decoded)
    one, two = decoded[0], decoded[2]
    assert one.bytes_per_token > two.bytes_per_token > one.bytes_per_token / 2
    assert json.loads(json.dumps(report.to_json()))["rows"][0]["engine"] == "bitwright"


def test_wrong_numbers_are_refused(tmp_path):
    with pytest.raises(BitwrightError, match="at least 1"):
        bench_llm(TinyModel(), contexts=(0,), peers=())
    missing = CliRunner().invoke(main, ["bench-llm", str(tmp_path / "none.gguf")])
    assert missing.exit_code == 2 and "does not exist" in missing.output
