"""Two ranks by hand: idle shares and the trace's events."""

import json

import pytest

from forebay.pipeline.activity import ActionRecord, bubble, trace_json

GIB = 2**30
# Rank 0 computes 0-1, 1-2, 5-8 and 8-10 of 10 ms, rank 1 computes 1-2, 2-5 and 4.5-6 (beside the one before) of them.
RECORDS = [
    ActionRecord(0, "F", "0F0", 100.0, 101.0, 1 * GIB),
    ActionRecord(0, "SEND_F", "0SEND_F0", 101.0, 101.5, 1 * GIB),
    ActionRecord(0, "F", "0F1", 101.0, 102.0, 2 * GIB),
    ActionRecord(0, "OVERLAP_F_B", "(0F12;3B1)OVERLAP_F_B", 105.0, 108.0, 2 * GIB),
    ActionRecord(0, "B", "0B1", 108.0, 110.0, 0),
    ActionRecord(1, "RECV_F", "1RECV_F0", 100.0, 101.5, 0),
    ActionRecord(1, "F", "1F0", 101.0, 102.0, 1 * GIB),
    ActionRecord(1, "I", "1I0", 102.0, 105.0, 1 * GIB),
    ActionRecord(1, "W", "1W0", 104.5, 106.0, 0),
]


def test_bubbles() -> None:
    """The span is that of all ranks; waiting is not computing; overlapping time counts once."""
    assert bubble(RECORDS) == {0: pytest.approx(1 - 7 / 10), 1: pytest.approx(1 - 5 / 10)}
    assert bubble(reversed(RECORDS)) == bubble(RECORDS)
    assert bubble([ActionRecord(3, "F", "0F0", 1, 1, 0)]) == {3: 0.0}
    spans = [(0, "F", 0, 1), (1, "F", 1, 2), (1, "B", 2, 4), (0, "B", 3, 5)]  # the example of the docstring
    example = [ActionRecord(rank, kind, f"{rank}{kind}0", start, end, 0) for rank, kind, start, end in spans]
    assert bubble(example) == pytest.approx({0: 0.4, 1: 0.4})
    with pytest.raises(ValueError, match="no records of actions"):
        bubble([])
    with pytest.raises(ValueError, match="0F0 of rank 2 ends at 1 ms, before its start at 2"):
        bubble([ActionRecord(2, "F", "0F0", 2, 1, 0)])


def test_trace() -> None:
    trace = json.loads(trace_json(RECORDS))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    ran = [e for e in events if e["ph"] == "X"]
    assert len(ran) == len(RECORDS)
    assert {"ph": "X", "name": "1W0", "cat": "W", "ts": 4500.0, "dur": 1500.0, "pid": 1, "tid": 0} in ran
    assert {"ph": "X", "name": "0SEND_F0", "cat": "SEND_F", "ts": 1000.0, "dur": 500.0, "pid": 0, "tid": 1} in ran
    memory = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert memory == [(1000.0, GIB), (1500.0, GIB), (2000.0, 2 * GIB), (8000.0, 2 * GIB), (10000.0, 0)]
