"""Progress lines, JSON lines and event files of a run."""

import json
import struct

from bitwright.train.history import History, Reporter
from bitwright.train.metrics import EventFile, MetricsFile, crc32c


def records(path):
    """The messages of an event file; checksums are checked."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        message = data[at + 12 : at + 12 + length]
        for part, place in ((data[at : at + 8], at + 8), (message, at + 12 + length)):
            check = crc32c(part)
            masked = ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack_from("<I", data, place) == (masked,)
        found.append(message)
        at += length + 16
    return found


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields(message):
    """The fields of a message: (number, value), nested messages as bytes."""
    at, found = 0, []
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", message, at)[0], at + 8
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", message, at)[0], at + 4
        else:
            length, at = varint(message, at)
            value, at = message[at : at + length], at + length
        found.append((key >> 3, value))
    return found


def test_the_checksum_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of its definition


def test_event_files_have_scalars_by_step(tmp_path):
    writer = EventFile(tmp_path)
    writer.add({"step": 300, "loss": 0.5, "lr": 0.25})
    writer.close()
    first, second = records(next(tmp_path.iterdir()))
    assert dict(fields(first))[3] == b"brain.Event:2"
    event = dict(fields(second))
    scalars = [dict(fields(value)) for _, value in fields(event[5])]
    assert event[2] == 300 and scalars == [{1: b"loss", 2: 0.5}, {1: b"lr", 2: 0.25}]


def test_a_resumed_run_starts_a_session_after_its_step(tmp_path):
    EventFile(tmp_path, 20).close()
    _, start = records(next(tmp_path.iterdir()))
    event = dict(fields(start))
    assert event[2] == 21 and fields(event[7]) == [(1, 1)]


def test_json_lines_have_null_for_nan_and_end_at_the_resumed_step(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = MetricsFile(path)
    for step in (10, 20, 30):
        writer.add({"step": step, "loss": float("nan")})
    writer.close()
    MetricsFile(path, 20).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 10, "loss": None}, {"step": 20, "loss": None}]


def test_lines_without_a_terminal(capsys):
    reporter = Reporter(History(), 1000, 900, None, None, True, 10)
    for number in range(901, 1001):
        reporter.step(number, {"loss": float(number)}, 0.1, 16)
    reporter.evaluation(1000, {"accuracy": 0.5})
    reporter.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("step 901/1000  loss 901  lr 0.1  ") and "left" not in lines[0]
    assert lines[1].startswith("step 910/1000  loss 906  ") and lines[1].endswith(" left")
    assert lines[-2].startswith("step 1000/1000  loss 995.5  ") and "left" not in lines[-2]
    assert lines[-1] == "evaluation after step 1000: accuracy 0.5"


def test_the_library_is_silent_without_a_terminal(capsys):
    reporter = Reporter(History(), None, 0, None, None, None, 10)
    reporter.step(1, {"loss": 1.0}, 0.1, 16)
    reporter.close()
    assert capsys.readouterr().err == ""
