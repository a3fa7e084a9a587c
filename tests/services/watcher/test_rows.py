"""Rows between the verifier and the trainer."""

from __future__ import annotations

import pytest
import torch

from services.common.row_frames import RowFrame, prompt_name
from services.heads.rollouts import to_learn_from
from services.watcher.rows import RowBuffer


def frame(prompt, policy=0, length=4, temperature=1.0, fill=0.5):
    tokens = torch.arange(length, dtype=torch.int32)
    hidden = torch.full((length, 8), fill, dtype=torch.bfloat16)
    return RowFrame(prompt_name([prompt]), policy, temperature, 1.0, -1, 0.0, tokens, hidden)


def test_a_frame_survives_its_bytes():
    before = RowFrame(
        "fedcba9876543210", 2**31, 0.75, 0.9, 50, 0.1, torch.tensor([1, 49151], dtype=torch.int32),
        torch.randn(2, 16).to(torch.bfloat16),
    )  # fmt: skip
    after = RowFrame.from_bytes(before.to_bytes())
    assert torch.equal(after.tokens, before.tokens)
    assert torch.equal(after.hidden, before.hidden)
    for name in ("prompt", "policy", "temperature", "top_p", "top_k", "min_p"):
        assert getattr(after, name) == getattr(before, name)


def test_what_is_no_frame_is_refused():
    with pytest.raises(ValueError, match="no frame"):
        RowFrame.from_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="rows of tokens"):
        RowFrame("0" * 16, 0, 1.0, 1.0, -1, 0.0, torch.zeros(3), torch.zeros(2, 8))


def test_heads_that_are_trained_before_a_run_learn_from_no_prompt_that_is_held_out_in_it():
    buffer = RowBuffer(10_000, 10_000, holdout=0.25)
    for prompt in range(200):
        buffer.add(frame(prompt))
    learned = to_learn_from([[prompt] for prompt in range(200)], 0.25)
    assert {prompt_name(p) for p in learned} == {f.prompt for _, f in buffer._frames[False]}
    assert 100 < len(learned) < 200
    assert to_learn_from([[1], [2]], 1.0) == [[1], [2]]


def test_prompts_stay_on_their_side():
    buffer = RowBuffer(10_000, 10_000, holdout=0.25)
    for i in range(400):
        buffer.add(frame(i % 100))
    train, held = buffer.training(10_000), buffer.held_out(10_000)
    assert len(train) + len(held) == 4 * 400
    assert 10 <= buffer.prompts(held_out=True) <= 40
    assert buffer.prompts(held_out=True) + buffer.prompts(held_out=False) == 100
    other = RowBuffer(10_000, 10_000, holdout=0.25)
    for i in range(100):
        other.add(frame(i))
    assert other.prompts(held_out=True) == buffer.prompts(held_out=True)


def test_the_newest_rows_are_kept_and_preferred():
    buffer = RowBuffer(100, 100, holdout=1e-9)
    for policy in range(60):
        buffer.add(frame(policy, policy=policy))
    assert 100 <= buffer.count(held_out=False) < 104
    assert buffer.training(1000).policies[0] == 35
    few = buffer.training(12)
    assert len(few) == 12
    assert few.policies[1] == 59


def test_each_side_has_a_bound_of_its_own():
    buffer = RowBuffer(200, 40, holdout=0.5)
    for i in range(300):
        buffer.add(frame(i % 100))
    assert 200 <= buffer.count(held_out=False) < 204
    assert 40 <= buffer.count(held_out=True) < 44


def test_older_policies_are_sampled_thinly():
    buffer = RowBuffer(100_000, 100_000, holdout=1e-9)
    for i in range(2000):
        buffer.add(frame(i, policy=0 if i < 1000 else 24, fill=float(i >= 1000)))
    chosen = buffer.training(100_000)
    old = int((chosen.hidden[:, 0] == 0).sum())
    assert int((chosen.hidden[:, 0] == 1).sum()) == 4000
    assert 600 < old < 1400  # two half-lives: a quarter of 4000


def test_rows_of_another_law_are_left_out():
    buffer = RowBuffer(1000, 1000, holdout=1e-9)
    for i in range(10):
        buffer.add(frame(i, temperature=0.6 if i < 3 else 1.0))
    chosen = buffer.training(1000)
    assert chosen.law == (1.0, 1.0, -1, 0.0)
    assert len(chosen) == 28
    with pytest.raises(ValueError, match="no rows"):
        RowBuffer(10, 10, holdout=0.1).training(10)


def test_rows_of_later_policies_are_counted():
    buffer = RowBuffer(10_000, 10_000, holdout=1e-9)
    assert buffer.first_policy is None
    for policy in (3, 3, 5, 4, 5):
        buffer.add(frame(policy, policy=policy))
    assert buffer.first_policy == 3
    assert [buffer.count(held_out=False, later_than=p) for p in (-1, 3, 4, 5)] == [20, 12, 8, 0]
    assert buffer.count(held_out=False, since=16, later_than=4) == 4


@pytest.mark.parametrize(
    ("later_than", "least", "prompts", "policies"),
    [
        (6, 4, 1, (7, 9)),  # those later, which are enough
        (9, 4, 1, (9, 9)),  # nothing is later: the newest
        (9, 12, 1, (7, 9)),
        (9, 4, 4, (6, 9)),
        (0, 4, 1, (1, 9)),
        (9, 1000, 1, (0, 9)),
    ],
)
def test_heads_for_a_policy_that_moved_are_judged_on_rows_that_came_with_it(later_than, least, prompts, policies):
    buffer = RowBuffer(10_000, 10_000, holdout=1 - 1e-9)
    for policy in range(10):
        buffer.add(frame(policy, policy=policy))
    assert buffer.held_out_later(10_000, 0, later_than, least=least, prompts=prompts).policies == policies
    assert buffer.held_out_later(8, 0, later_than, least=least, prompts=prompts).policies[0] >= 8


def test_a_row_that_comes_late_hides_none_of_later_policies():
    buffer = RowBuffer(10_000, 10_000, holdout=1 - 1e-9)
    for prompt, policy in enumerate((1, 4, 5, 1, 6)):
        buffer.add(frame(prompt, policy=policy))
    chosen = buffer.held_out_later(10_000, 0, 3, least=4, prompts=1)
    assert (len(chosen), chosen.policies) == (12, (4, 6))
    assert buffer.held_out_later(10_000, 0, 3, least=16, prompts=1).policies == (1, 6)
