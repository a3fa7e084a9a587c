"""What SGLang hands to the sampler, turned into the law; the law itself is tested with the core."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from services.rollout.sglang_plugin.sampler import law_params
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams, final_logprobs, sample
from specroll_core.randomness import Stream, uniforms

REQUESTS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.4, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(),
]


def batch_info(requests):
    """As `SamplingBatchInfo.from_schedule_batch` fills it, from SGLang's own normalised parameters."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL
    from sglang.srt.sampling.sampling_params import SamplingParams as SGLangParams

    params = [SGLangParams(temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p) for r in requests]
    return SimpleNamespace(
        temperatures=torch.tensor([p.temperature for p in params]).view(-1, 1),
        top_ps=torch.tensor([p.top_p for p in params]),
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        min_ps=torch.tensor([p.min_p for p in params]),
        is_all_greedy=all(p.top_k <= 1 for p in params),
        is_any_greedy=any(p.top_k <= 1 for p in params),
        need_top_p_sampling=any(p.top_p != 1 for p in params),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
    )


def test_sglangs_parameters_give_the_law_that_was_asked_for():
    logits = torch.randn(len(REQUESTS), 300, generator=torch.Generator().manual_seed(0)) * 3
    for chosen in (range(len(REQUESTS)), [5], [1, 5], [0, 4], [0, 5]):
        requests = [REQUESTS[i] for i in chosen]
        rows = logits[list(chosen)]
        got = final_logprobs(rows, law_params(batch_info(requests)))
        torch.testing.assert_close(got, final_logprobs(rows, LawParams.from_requests(requests)))


def test_draws_by_seed_and_position_follow_the_law():
    draws = 100_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    probs = final_logprobs(logits, LawParams.build([0.8], top_p=[0.95])).exp()
    positions = torch.arange(draws)
    drawn = uniforms(torch.full((draws,), 99), positions, Stream.VERIFY, 1)[:, 0]
    tokens = sample(probs.expand(draws, -1), drawn)
    counts = torch.bincount(tokens, minlength=40).double()
    inside = probs[0] > 0
    assert counts[~inside].sum() == 0
    expected = draws * probs[0, inside].double()
    chi2 = float(((counts[inside] - expected) ** 2 / expected).sum())
    freedom = int(inside.sum()) - 1
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5 + 8
