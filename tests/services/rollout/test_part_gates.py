"""Gates beside SGLang's requests: comparisons follow a request and are dropped where something was not seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.rollout.sglang_plugin.part_gates import PartGates
from specroll_core.gate import GateOptions, TreeTrace

BETTER = TreeTrace([9, 5, 7], [-1, 0, 1], [False] * 3, [1.0, 0.5, 0.4])
WORSE = TreeTrace([9, 6, 7], [-1, 0, 1], [False] * 3, [1.0, 0.5, 0.4])


def request(rid, emitted=0):
    return SimpleNamespace(rid=rid, output_ids=[0] * emitted)


def emit(gates, one, row, tokens):
    gates.observe([one], [row], [tokens])
    one.output_ids.extend(tokens)


def comparisons(gates, part="memory"):
    return next(r["comparisons"] for r in gates.record() if r["part"] == part)


def test_a_comparison_ends_once_its_tokens_are_known():
    gates, one = PartGates(["memory"], depth=2), request("a", 3)
    gates.compare("memory", one, 4, BETTER, WORSE)
    emit(gates, one, 4, [5])
    assert comparisons(gates) == 0
    emit(gates, one, 4, [7, 1])
    (record,) = gates.record()
    assert (record["comparisons"], record["gain"], record["on"], record["switches"]) == (1, 2.0, True, 0)


@pytest.mark.parametrize("change", ["a token that was not seen", "another request", "the row is not in the batch"])
def test_what_was_not_seen_drops_a_comparison(change):
    gates, one = PartGates(["memory"], depth=2), request("a", 3)
    gates.compare("memory", one, 4, BETTER, WORSE)
    if change == "a token that was not seen":  # the prefill after a retraction
        one.output_ids.append(5)
    elif change == "another request":
        one = request("b", 3)
    else:
        emit(gates, request("c"), 5, [5, 7])
    emit(gates, one, 4, [5, 7])
    assert comparisons(gates) == (change == "the row is not in the batch")
    gates.compare("memory", one, 4, BETTER, WORSE)
    emit(gates, one, 4, [5, 7])
    assert comparisons(gates) == 1 + (change == "the row is not in the batch")


def test_a_losing_part_goes_off_and_comes_back():
    gates, one = PartGates(["memory"], depth=2, options=GateOptions(every=4, window=50, least=10)), request("a")
    assert [gates.due("memory") for _ in range(8)] == [False, False, False, True] * 2
    assert not gates.due("lookup")
    assert gates.is_on("lookup")
    for _ in range(10):
        gates.compare("memory", one, 0, WORSE, BETTER)
        emit(gates, one, 0, [5, 7])
    assert not gates.is_on("memory")
    for _ in range(200):
        # It is off now: the tree that was verified is the one without.
        gates.compare("memory", one, 0, WORSE, BETTER)
        emit(gates, one, 0, [5, 7])
        if gates.is_on("memory"):
            break
    assert gates.is_on("memory")
    (record,) = gates.record()
    assert record["switches"] == 2
    assert record["gain"] > 0


def test_every_request_has_its_turn():
    gates = PartGates(["memory"], depth=2, options=GateOptions(every=2))
    turns = [gates.turn("memory", 3) for _ in range(12) if gates.due("memory")]
    assert set(turns) == {0, 1, 2}
