from __future__ import annotations

import torch

from services.lossless.greedy import divergences, first_difference
from services.rollout.completion import Completion
from specroll_core.contracts import FinishReason, VersionSpan
from tests.services.rollout.test_engine import greedy


def completion(tokens):
    return Completion(
        tuple(tokens), (0.0,) * len(tokens), FinishReason.LENGTH, (VersionSpan(0, 0, len(tokens)),), cached_tokens=0
    )


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_differences_are_ties_only_where_the_two_best_logits_say_so(target):
    prompts = [(5, 6), (7, 8, 9), (3,)]
    plain = [greedy(target.model, p, 8) for p in prompts]
    other = [list(tokens) for tokens in plain]
    other[1][3] = (other[1][3] + 1) % 320
    other[2] = other[2][:5]
    found = divergences(target, prompts, [*map(completion, plain)], [*map(completion, other)])
    assert [(d.prompt, d.position, d.tie) for d in found] == [(1, 3, False), (2, 5, False)]
    assert (found[0].plain, found[0].speculative, found[1].speculative) == (plain[1][3], other[1][3], -1)
    with torch.no_grad():
        best = target.model(torch.tensor([[*prompts[1], *plain[1][:3]]])).logits[0, -1].topk(2)
    assert abs(found[0].gap - float(best.values[0] - best.values[1])) < 1e-5


def test_a_tie_is_one(target, monkeypatch):
    prompt = (5, 6)
    tokens = greedy(target.model, prompt, 4)
    with torch.no_grad():
        best = target.model(torch.tensor([[*prompt, *tokens[:2]]])).logits[0, -1].topk(2)
    gap = float(best.values[0] - best.values[1])
    other = [*tokens[:2], int(best.indices[1]), 0]
    monkeypatch.setattr("services.lossless.greedy.TIE", gap * 1.01)
    assert [d.tie for d in divergences(target, [prompt], [completion(tokens)], [completion(other)])] == [True]
    other[2] = int(best.indices[1]) + 1
    assert [d.tie for d in divergences(target, [prompt], [completion(tokens)], [completion(other)])] == [False]
