"""Sums that see whether tokens lean towards the drafter: against enumeration, and on texts of a known law."""

from __future__ import annotations

import math

import pytest
import torch

from services.lossless.leaning import SHARES, Leaning, LogprobGap, growth_moments, leaning_terms, measure
from services.lossless.options import LawUnderTest
from services.rollout.completion import Completion
from specroll_core.contracts import FinishReason, VersionSpan
from specroll_core.goodness_of_fit import two_sided_p, wealth_p
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.services.rollout.test_engine import forced_logits, naive_law


def test_terms_are_those_of_enumeration():
    p, q = [0.6, 0.3, 0.1, 0.0], [0.05, 0.05, 0.6, 0.3]
    f = [min(b / a, 4.0) if a else 4.0 for a, b in zip(p, q, strict=True)]
    mean = sum(a * c for a, c in zip(p, f, strict=True))
    for token in range(3):
        got = leaning_terms(torch.tensor([p]).log(), torch.tensor([q]).log(), torch.tensor([token]), clip=4.0)
        assert float(got.excess) == pytest.approx(f[token] - mean, abs=1e-6)
        assert float(got.variance) == pytest.approx(
            sum(a * c * c for a, c in zip(p, f, strict=True)) - mean**2, abs=1e-6
        )
        assert float(got.log_ratio) == pytest.approx(math.log(q[token] / p[token]), abs=1e-6)


def follow(share: float, draws: int = 6000, seed: int = 0) -> Leaning:
    """Tokens of laws that change at every step, a `share` of them drawn from the drafter's law in their place."""
    g = torch.Generator().manual_seed(seed)
    log_p = (torch.randn(draws, 50, generator=g) * 3).log_softmax(-1)
    log_q = (0.5 * log_p + torch.randn(draws, 50, generator=g) * 2).log_softmax(-1)
    foreign = torch.rand(draws, generator=g) < share
    law = torch.where(foreign[:, None], log_q, log_p).exp()
    tokens = torch.multinomial(law, 1, generator=g).squeeze(1)
    leaning = Leaning(1)
    leaning.tokens = draws
    for part in torch.arange(draws).split(500):
        leaning.add(0, leaning_terms(log_p[part], log_q[part], tokens[part]))
        leaning.growth += growth_moments(log_p[part], log_q[part], 0.01)
    return leaning


def test_tokens_of_the_law_pass_and_foreign_ones_are_seen():
    honest = [follow(0.0, seed=s) for s in range(40)]
    z = torch.tensor([leaning.z[0] for leaning in honest])
    assert abs(float(z.mean())) < 3 / math.sqrt(40)
    assert 0.6 < float(z.std()) < 1.5
    assert min(p for leaning in honest for p in leaning.p_values) > 1e-4
    wrong = [follow(0.02, seed=s) for s in range(20)]
    assert max(min(leaning.p_values) for leaning in wrong) < 1e-6


def test_the_share_that_is_said_to_be_noticed_is():
    share = follow(0.0).detectable(tests=50)
    assert 0 < share < 0.05
    assert max(follow(share, seed=s).p_values[-1] for s in range(40)) < 0.001 / 50
    assert min(follow(share / 8, seed=s).p_values[-1] for s in range(10)) > 0.001 / 50


def test_parts_add_up():
    one, other = follow(0.0, seed=1, draws=500), follow(0.0, seed=2, draws=700)
    both = Leaning.together([one, other])
    assert both.tokens == 1200
    assert float(both.excess) == pytest.approx(float(one.excess + other.excess))
    assert both.p_values[-1] == wealth_p(one.log_wealth + other.log_wealth)
    assert both.detectable(10) < min(one.detectable(10), other.detectable(10))


def test_a_forbidden_token_fails_whatever_else_was_seen():
    leaning = follow(0.0)
    leaning.outside = 1
    assert set(leaning.p_values) == {0.0}


def completion(tokens, logprobs):
    spans = (VersionSpan(0, 0, len(tokens)),)
    return Completion(tuple(tokens), tuple(logprobs), FinishReason.LENGTH, spans, 0)


@pytest.mark.parametrize("law", [LawUnderTest(1.0, 1.0), LawUnderTest(0.7, 0.9)])
def test_measure_follows_a_text_as_a_naive_loop_does(target, law):
    torch.manual_seed(1)
    heads = FutureTokenHeads(HeadsSpec(2, 64, 8, 320))
    torch.nn.init.normal_(heads.up)
    settings = {"temperature": law.temperature, "top_p": law.top_p}
    prompts, completions, expected = [], [], [[0.0, 0.0, 0.0] for _ in range(2)]
    worst = 0.0
    for i in range(3):
        prompt, tokens, logprobs = (5, 6, 7 + i), [], []
        for _ in range(9 + i):
            with torch.no_grad():
                row = naive_law(forced_logits(target.model, prompt, [*tokens, 0])[-1], **settings)
            tokens.append(max(row, key=lambda v: (row[v], v)) if len(tokens) % 2 else sorted(row)[len(row) // 2])
            logprobs.append(math.log(row[tokens[-1]]) + 0.01 * len(tokens))
            worst = max(worst, 0.01 * len(tokens))
        with torch.no_grad():
            rows = [naive_law(row, **settings) for row in forced_logits(target.model, prompt, tokens)]
            ids = torch.tensor([[*prompt, *tokens]])
            hidden = target.model.model(ids).last_hidden_state[0, len(prompt) - 1 :]
            for k, sums in enumerate(expected, 1):
                for t in range(k, len(tokens)):
                    z = heads(hidden[t - k][None], target.embedding[tokens[t - k]][None])[0, k - 1]
                    q = torch.softmax((target.lm_head @ z).double() / law.temperature, 0)
                    f = {v: min(float(q[v]) / p, 10.0) for v, p in rows[t].items()}
                    mean = sum(p * f[v] for v, p in rows[t].items())
                    sums[0] += f[tokens[t]] - mean
                    sums[1] += sum(p * f[v] ** 2 for v, p in rows[t].items()) - mean**2
                    sums[2] += math.log1p(SHARES[-1] * (float(q[tokens[t]]) / rows[t][tokens[t]] - 1))
        prompts.append(prompt)
        completions.append(completion(tokens, logprobs))
    gap, seen = LogprobGap(), []
    leaning = measure(target, heads, law, prompts, completions, gap, seen.append)
    assert leaning.outside == 0
    assert leaning.tokens == sum(len(c.token_ids) - 1 for c in completions)
    assert seen[-1] == gap.tokens == sum(len(c.token_ids) for c in completions)
    for k, (excess, variance, wealth) in enumerate(expected):
        assert float(leaning.excess[k]) == pytest.approx(excess, abs=2e-3)
        assert float(leaning.variance[k]) == pytest.approx(variance, rel=1e-3)
        assert float(leaning.log_wealth[k, -1]) == pytest.approx(wealth, abs=2e-3)
    assert leaning.p_values == [*map(two_sided_p, leaning.z), wealth_p(leaning.log_wealth)]
    assert gap.largest == pytest.approx(worst, abs=1e-3)


def test_a_token_outside_top_p_is_counted(target):
    law = LawUnderTest(1.0, 0.3)
    row = naive_law(forced_logits(target.model, (5, 6), [9, 0])[-1], top_p=0.3)
    never = next(v for v in range(320) if v not in row)
    leaning = measure(target, None, law, [(5, 6)], [completion([9, never], [-1.0, -9.0])], LogprobGap())
    assert leaning.outside >= 1


def test_a_missing_logprob_is_refused(target):
    with pytest.raises(ValueError, match="log-probabilities"):
        measure(target, None, LawUnderTest(1.0, 1.0), [(5,)], [completion([9, 8], [-1.0])], LogprobGap())
