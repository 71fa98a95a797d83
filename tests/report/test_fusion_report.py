"""The fusion report and the text of the planned schedule."""

import re

import numpy as np

import bitwright as bw
from bitwright import demo
from bitwright.lir.plan import plan
from bitwright.lir.text import planned_text
from bitwright.report.fusion import fusion


def test_regions_of_the_demo_model():
    found = fusion(bw.compile(demo.model_path(), threads=1).history)
    assert {region.anchor for region in found.regions} == {"conv", "matmul"}
    assert found.regions[0].epilogue[-1] == "relu" and found.regions[0].prologue == ()
    assert found.unfused == {"max_pool": 1, "reduce_mean": 1}
    reasons = {refusal.reason.partition(": ")[2] for refusal in found.refusals}
    assert reasons >= {"it has another reader", "max_pool takes no epilogue"}
    assert found.as_json()["regions"][0]["anchor"] == "conv"


def test_prologues_and_reasons_for_refusals():
    b = bw.Builder("norms")
    x, scale = b.input("x", "f32[4, 8]"), b.constant(np.ones(8, np.float32))
    first = b.layer_norm(b.add(x, b.exp(x)), scale)
    product = b.matmul(first, b.constant(np.ones((8, 8), np.float32)))
    graph = b.build(y=b.softmax(b.exp(product)))
    found = fusion(bw.compile(graph, threads=1).history)
    norm = next(region for region in found.regions if region.anchor == "layer_norm")
    assert norm.prologue == ("exp", "add")
    (refusal,) = [r for r in found.refusals if r.rule == "fuse-prologue"]
    assert refusal.reason.endswith("it is in the epilogue of matmul")


def test_what_was_recognized_is_counted():
    b = bw.Builder("gelu")
    x = b.input("x", "f32[4, 8]")
    graph = b.build(y=b.mul(b.mul(x, b.add(b.erf(b.div(x, 2**0.5)), 1.0)), 0.5))
    assert sum(fusion(bw.compile(graph, threads=1).history).recognized.values()) == 1


def test_the_planned_schedule_shows_all_offsets():
    schedule = bw.compile(demo.model_path(), threads=1).engine.schedule
    text, layout = planned_text(schedule, {"batch": 8}), plan(schedule, {"batch": 8})
    assert f"arena {layout.total:,} bytes; at least {layout.lower_bound:,} live at once" in text
    assert layout.lower_bound <= layout.total
    for buffer, offset in layout.offsets.items():
        life = rf"{re.escape(str(buffer))} at {offset:,}, {layout.nbytes[buffer]:,} bytes, step"
        assert re.search(life, text)
    for number, step in enumerate(schedule.steps):
        assert f"  {number:3} {step}" in text
