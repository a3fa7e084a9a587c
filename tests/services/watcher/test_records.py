"""Feedback, and the log of it."""

from __future__ import annotations

import pytest

from services.rollout.completion import Completion, Round
from services.rollout.heads_feedback import spans_of, trajectory_feedback
from services.watcher.records import FeedbackLog, drift_records, read_log
from specroll_core.contracts import FinishReason, SamplingParams, VersionSpan


def completion(rounds, heads, policy=((0, 0, 100),), tokens=100):
    return Completion(
        token_ids=tuple(range(tokens)),
        logprobs=(0.0,) * tokens,
        finish_reason=FinishReason.LENGTH,
        policy_version_spans=tuple(VersionSpan(*span) for span in policy),
        cached_tokens=0,
        head_version_spans=tuple(VersionSpan(*span) for span in heads),
        rounds=tuple(Round(start, drafted, accepted, (0,) * accepted) for start, drafted, accepted in rounds),
    )


def test_rounds_are_counted_by_version_and_width():
    rounds = [(1, 4, 2), (4, 4, 0), (5, 4, 3), (9, 7, 1), (11, 0, 0), (12, 4, 1), (100, 4, 4)]
    made = completion(rounds, heads=[(1, 0, 10), (2, 10, 100)])
    found = trajectory_feedback("r", [5, 6], SamplingParams(temperature=0.5), made)
    cells = {(c.heads_version, c.drafted): list(c.accepted) for c in found.rounds}
    # The round that drafted nothing and the one behind the end are left out.
    assert cells == {(1, 4): [1, 0, 1, 1], (1, 7): [0, 1], (2, 4): [0, 1]}
    records = {(r.heads, r.stratum): r for r in drift_records(found)}
    four = records[1, "T=0.5 n=4"]
    assert four.reached == (3, 2, 2)
    assert four.accepted == (2, 2, 1)
    assert four.cluster == found.prompt
    assert len({r.cluster for r in records.values()}) == 1


def test_spans_from_marks():
    assert spans_of([], 5) == ()
    assert spans_of([(1, 0)], 5) == (VersionSpan(1, 0, 5),)
    # 2 was replaced before a token came, 4 came after the last one, and 3 again is 3 still.
    marks = [(1, 0), (2, 3), (3, 3), (3, 4), (4, 5)]
    assert spans_of(marks, 5) == (VersionSpan(1, 0, 3), VersionSpan(3, 3, 5))


def test_the_log_can_be_read_again(tmp_path):
    log = FeedbackLog(tmp_path / "feedback.jsonl")
    log.write("record", {"at": 1.5})
    log.write("swapped", {"version": 2})
    log.close()
    assert list(read_log(tmp_path / "feedback.jsonl")) == [
        {"kind": "record", "at": 1.5},
        {"kind": "swapped", "version": 2},
    ]
    (tmp_path / "bad.jsonl").write_text('{"kind": "record"}\nnothing\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_log(tmp_path / "bad.jsonl"))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_log(tmp_path / "missing.jsonl"))
