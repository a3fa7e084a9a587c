"""The hidden-state correction and the gates in a running engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from services.config import EngineConfig, SpeculationConfig
from services.rollout.completion import SpeculationOverride
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams
from specroll_core.goodness_of_fit import chi_square_p
from tests.services.rollout.test_engine import PROMPTS, greedy, load, sample
from tests.services.rollout.test_speculation import exact_law
from tests.tiny_heads import make_tiny_heads

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir)


@pytest.fixture(scope="module")
def engine(tiny_dir, model, tmp_path_factory):
    path = make_tiny_heads(model, PROMPTS, tmp_path_factory.mktemp("heads") / "heads.safetensors")
    config = EngineConfig(
        threads=1,
        context_length=1024,
        max_total_tokens=3072,
        max_running_requests=16,
        speculation=SpeculationConfig(enabled=True, heads=path, nodes=6, max_nodes=8, correction="trajectory"),
        # Admits more requests than the pool holds to their end, so that some are retracted.
        args={"chunked_prefill_size": 64, "schedule_conservativeness": 0.05},
    )
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    yield engine
    engine.close()


async def many(engine, count, length, override=None, **law):
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, **law)
    return await asyncio.gather(
        *(
            engine.generate(PROMPTS[i % len(PROMPTS)], params, request_id=f"many-{i}", speculation=override)
            for i in range(count)
        )
    )


@pytest.fixture(scope="module")
def ready(engine, run):
    """The engine once corrections have directions: trees were compared with and without."""
    for _ in range(20):
        run(many(engine, 16, 150, temperature=0.8), timeout=120)
        parts = {part.part: part for part in run(engine.speculation_parts())}
        if parts["correction"].comparisons > 5:
            return parts
    pytest.fail("nothing was corrected")


def test_gates_tell_how_their_parts_stand(ready):
    assert set(ready) == {"memory", "correction"}
    for part in ready.values():
        assert part.on
        assert part.switches == 0
        assert part.comparisons > 5
        assert abs(part.gain) < 3
    assert ready["memory"].standard_error > 0


def test_greedy_texts_are_those_of_the_model(engine, ready, run, model):
    completions = run(many(engine, len(PROMPTS), 60, temperature=0.0))
    for prompt, got in zip(PROMPTS, completions, strict=True):
        assert got.token_ids[:20] == greedy(model, prompt, 60)[:20]


@pytest.mark.parametrize("parts", [("heads", "correction"), ("heads", "memory", "correction-group")])
def test_sequences_follow_the_law_with_corrected_heads(engine, ready, run, model, parts):
    """Many rounds of sixteen requests precede the four tokens that are looked at, in the same group."""
    law, length, draws = {"temperature": 0.9, "top_k": 4}, 4, 2000
    override = SpeculationOverride(parts=parts, group="law")

    async def go():
        params = SamplingParams(max_new_tokens=length, ignore_eos=True, **law)
        return await asyncio.gather(
            *(
                engine.generate(PROMPTS[1], params, request_id=f"law-{parts[-1]}-{i}", speculation=override)
                for i in range(draws)
            )
        )

    completions = run(go(), timeout=200)
    exact = exact_law(model, PROMPTS[1], length, **law)
    where = {tokens: i for i, tokens in enumerate(exact)}
    counts = torch.zeros(len(where), dtype=torch.int64)
    for completion in completions:
        counts[where[completion.token_ids]] += 1
    assert chi_square_p(counts, torch.tensor(list(exact.values()), dtype=torch.float64)) > 1e-4


def test_retracted_requests_finish(engine, ready, run):
    completions = run(many(engine, 16, 400, temperature=1.0), timeout=200)
    assert all(len(completion.token_ids) == 400 for completion in completions)


def test_a_request_may_ask_for_no_correction(engine, ready, run):
    before = {part.part: part.comparisons for part in run(engine.speculation_parts())}
    run(many(engine, 8, 100, SpeculationOverride(parts=("heads",)), temperature=1.0))
    assert {part.part: part.comparisons for part in run(engine.speculation_parts())} == before
    got = run(sample(engine, PROMPTS[0], max_new_tokens=50, temperature=0.5, ignore_eos=True))
    assert got.spec.accepted > 0
