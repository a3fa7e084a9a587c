from __future__ import annotations

import math

import pytest
import torch

from services.lossless.exact import Text
from services.lossless.options import LawUnderTest, LosslessOptions
from services.lossless.prefixes import choose_prefixes
from services.rollout.completion import Completion
from specroll_core.contracts import FinishReason, VersionSpan
from tests.services.rollout.test_engine import forced_logits, greedy, naive_law

LAWS = (LawUnderTest(1.0, 1.0), LawUnderTest(0.6, 0.9))
OPTIONS = LosslessOptions(prefixes=4, certain=0.15, entropy=(0.5, 4.0))


@pytest.fixture(scope="module")
def texts(target):
    prompts = [(5, 6), (7, 8, 9), (30, 31)]
    return [Text(prompt, greedy(target.model, prompt, 60), i) for i, prompt in enumerate(prompts)]


def test_prefixes_are_the_first_that_satisfy_the_rule(target, texts):
    chosen = choose_prefixes(target, texts, LAWS, OPTIONS)
    for law in LAWS:
        expected = []
        for text in texts:
            rows = forced_logits(target.model, text.prompt, (*text.tokens, 0))
            found = 0
            for at in range(1, len(text.tokens)):
                here, after = (
                    naive_law(row, temperature=law.temperature, top_p=law.top_p) for row in (rows[at], rows[at + 1])
                )
                entropy = -sum(p * math.log(p) for p in after.values())
                if here.get(text.tokens[at], 0.0) >= 0.15 and 0.5 <= entropy <= 4.0:
                    expected.append((found, text.name, (*text.prompt, *text.tokens[:at]), text.tokens[at], after))
                    found += 1
        expected = sorted(expected, key=lambda e: e[:2])[:4]
        assert len(expected) == 4
        assert [(p.ids, p.certain) for p in chosen[law]] == [e[2:4] for e in expected]
        for prefix, (*_, after) in zip(chosen[law], expected, strict=True):
            assert {int(v) for v in prefix.law.nonzero()} == set(after)
            for v, p in after.items():
                assert float(prefix.law[v]) == pytest.approx(p, abs=1e-4)


def test_only_what_follows_the_certain_token_counts(target, texts):
    prefix = choose_prefixes(target, texts, LAWS, OPTIONS)[LAWS[0]][0]

    def completion(*tokens):
        return Completion(tokens, (0.0, 0.0), FinishReason.LENGTH, (VersionSpan(0, 0, 2),), 0)

    other = (prefix.certain + 1) % 320
    counts = prefix.counts([completion(prefix.certain, 7), completion(other, 8), completion(prefix.certain, 7)])
    assert counts.nonzero().flatten().tolist() == [7]
    assert int(counts[7]) == 2

    g = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(prefix.law, 4000, replacement=True, generator=g).bincount(minlength=320)
    assert prefix.p_value(drawn) > 1e-3
    shifted = torch.multinomial(prefix.law.sqrt(), 4000, replacement=True, generator=g).bincount(minlength=320)
    assert prefix.p_value(shifted) < 1e-6
