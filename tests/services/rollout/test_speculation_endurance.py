"""Ten thousand requests through a speculating engine: nothing is kept of those that have ended."""

from __future__ import annotations

import asyncio
import itertools

import psutil
import pytest

from services.config import EngineConfig, SpeculationConfig
from services.rollout.completion import SpeculationOverride
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import FinishReason, SamplingParams
from tests.services.rollout.test_engine import PROMPTS, load
from tests.tiny_heads import make_tiny_heads

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

IN_FLIGHT = 32
# Requests until all that has a bound of its own is full: the table of rollouts holds 32,768 tokens.
WARM = 12_000
# Of one stretch: the allocator's own unrest. A state of 1 KB kept for each request would be 5 MB in every stretch; a
# thread that makes the correction's directions anew takes an arena of its own once, in one.
STRETCHES, STRETCH = 2, 5_000
GROWTH_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def engine(tiny_dir, tmp_path_factory):
    path = make_tiny_heads(load(tiny_dir), PROMPTS, tmp_path_factory.mktemp("heads") / "heads.safetensors")
    config = EngineConfig(
        threads=1,
        context_length=512,
        max_total_tokens=8192,
        max_running_requests=IN_FLIGHT,
        speculation=SpeculationConfig(enabled=True, heads=path, nodes=6, max_nodes=8, table=True, correction="group"),
    )
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    yield engine
    engine.close()


def test_memory_is_flat_over_ten_thousand_requests(engine, run) -> None:
    async def some(first: int, count: int) -> None:
        numbers = iter(range(first, first + count))

        async def one_after_another() -> None:
            for number in numbers:
                name, prompt = f"endure-{number}", PROMPTS[number % len(PROMPTS)]
                law = SamplingParams(temperature=1.0, max_new_tokens=2 + number % 5)
                asked = SpeculationOverride(group=f"group-{number // 4}")
                request = asyncio.create_task(engine.generate(prompt, law, request_id=name, speculation=asked))
                if number % 50 == 0:
                    await asyncio.sleep(0)
                    await engine.abort(name)
                completion = await request
                assert completion.finish_reason in FinishReason

        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))

    def resident() -> dict[str, int]:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return {f"{p.name()} {p.pid}": p.memory_info().rss for p in family}

    run(some(0, WARM), timeout=360)
    seen = [resident()]
    for turn in range(STRETCHES):
        run(some(WARM + STRETCH * turn, STRETCH), timeout=360)
        seen.append(resident())
    processes = set.intersection(*map(set, seen))
    assert len(processes) >= 3  # this process, the scheduler, the detokenizer
    grown = {name: min(after[name] - before[name] for before, after in itertools.pairwise(seen)) for name in processes}
    assert {name: size for name, size in grown.items() if size > GROWTH_BYTES} == {}
