"""The share of drafted tokens, against a count of them token by token."""

from __future__ import annotations

import random

import pytest

from services.rollout.heads_feedback import trajectory_feedback
from services.watcher.drafted_share import DraftedShare
from specroll_core.contracts import SamplingParams
from tests.services.watcher.test_records import completion


def generated(rng, tokens, often):
    """A trajectory of rounds that follow each other, of which a share `often` drafted; and who each token came from."""
    start, rounds, from_drafts = 1, [], [False]
    while start < tokens:
        drafted = 4 if rng.random() < often else 0
        accepted = rng.randrange(drafted + 1)
        rounds.append((start, drafted, accepted))
        from_drafts += [drafted > 0] * (accepted + 1)
        start += accepted + 1
    tokens = len(from_drafts)
    made = completion(rounds, heads=[(1, 0, tokens)], policy=((0, 0, tokens),), tokens=tokens)
    return trajectory_feedback("r", [5], SamplingParams(), made), sum(from_drafts), tokens


@pytest.mark.parametrize("often", [0.0, 0.05, 0.3, 1.0])
def test_a_stretch_is_blind_where_few_tokens_came_from_drafted_rounds(often):
    rng = random.Random(0)
    share, drafted, tokens = DraftedShare(1000, 1000), 0, 0
    while tokens < 1000:
        assert not share.found_blind()
        made, d, t = generated(rng, 60, often)
        share.add(made)
        drafted, tokens = drafted + d, tokens + t
    assert share.found_blind() == (drafted / tokens < 0.25)
    assert share.last == pytest.approx(drafted / tokens)
    assert share.found_blind() is False  # said once


def test_each_blind_stretch_is_twice_as_long_until_enough_is_drafted():
    rng = random.Random(1)
    share = DraftedShare(100, 350)

    def length(often):
        """Tokens until a stretch has ended, one by one."""
        last, share.last = share.last, -1.0
        for tokens in range(1, 1000):
            made, _, _ = generated(rng, 1, often)
            made.tokens = 1
            if often:
                made.rounds.add(heads_version=1, drafted=4, accepted=[1])
            share.add(made)
            share.found_blind()
            if share.last >= 0:
                return tokens
        share.last = last
        return None

    assert [length(0) for _ in range(4)] == [100, 200, 350, 350]
    assert [length(1) for _ in range(2)] == [350, 100]
    assert [length(0) for _ in range(2)] == [100, 200]
