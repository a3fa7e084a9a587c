"""The engine with speculation on, on the tiny model in float32, against plain `transformers`: nothing may differ but
the number of steps."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from services.config import EngineConfig, SpeculationConfig
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import FinishReason, SamplingParams
from specroll_core.goodness_of_fit import chi_square_p
from specroll_core.law import LawParams, final_logprobs
from specroll_core.law import sample as draw
from specroll_core.randomness import Stream, uniforms
from tests.services.rollout.test_engine import (
    PROMPTS,
    assert_logprobs_follow,
    forced_logits,
    greedy,
    greedy_ignoring_eos,
    load,
    naive_law,
    penalised,
    sample,
    until_sampling,
)
from tests.tiny import EOS_ID
from tests.tiny_heads import make_tiny_heads

NODES = 6


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir)


@pytest.fixture(scope="module")
def other_model(other_tiny_dir):
    return load(other_tiny_dir)


@pytest.fixture(scope="module")
def _spec_engine(tiny_dir, model, tmp_path_factory):
    path = make_tiny_heads(model, PROMPTS, tmp_path_factory.mktemp("heads") / "heads.safetensors")
    config = EngineConfig(
        threads=1,
        context_length=1024,
        max_total_tokens=3072,
        max_running_requests=16,
        speculation=SpeculationConfig(enabled=True, heads=path, nodes=NODES, max_nodes=8),
        # Admits more requests than the pool holds to their end, so that some are retracted.
        args={"chunked_prefill_size": 64, "schedule_conservativeness": 0.05},
    )
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(_spec_engine, tiny_dir, run):
    yield _spec_engine
    if _spec_engine.policy_version != 0:
        run(_spec_engine.update_policy(tiny_dir, 0, pause_mode="retract"))


def assert_adds_up(completion):
    """A prefill emits one token, a round one more than it accepts; only what the end cut off may be missing."""
    spec = completion.spec
    assert spec.drafted <= spec.verify_steps * (NODES - 1)
    assert len(completion.token_ids) <= 1 + spec.verify_steps + spec.accepted
    if completion.finish_reason is FinishReason.LENGTH and spec.verify_steps:
        assert len(completion.token_ids) + 1 >= 1 + spec.verify_steps + spec.accepted
    assert list(spec.accepted_by_depth) == sorted(spec.accepted_by_depth, reverse=True)


def test_greedy_equals_transformers_in_fewer_steps(engine, run, model):
    async def together():
        return await asyncio.gather(*(sample(engine, p, temperature=0, max_new_tokens=60) for p in PROMPTS))

    steps = tokens = 0
    for prompt, got in zip(PROMPTS, run(together()), strict=True):
        alone = run(sample(engine, prompt, temperature=0, max_new_tokens=60))
        assert got.token_ids == alone.token_ids == greedy(model, prompt, 60)
        assert set(got.logprobs) == {0.0}
        assert_adds_up(got)
        steps, tokens = steps + got.spec.verify_steps, tokens + len(got.token_ids)
    assert tokens > 1.5 * steps


def test_a_stream_brings_the_blocks_of_its_rounds(engine, run, model):
    """No delta is cut short or said twice, and each holds the tokens of one round at most."""

    async def go():
        law = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
        return [delta async for delta in engine.stream(PROMPTS[0], law, request_id="blocks")]

    deltas = run(go())
    completion = deltas[-1].completion
    assert [d.completion for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert tuple(t for d in deltas for t in d.token_ids) == completion.token_ids
    assert completion.token_ids == greedy_ignoring_eos(model, PROMPTS[0], 60)
    assert tuple(x for d in deltas for x in d.logprobs) == completion.logprobs
    blocks = [1, *(min(entry.accepted + 1, 60 - entry.start) for entry in completion.rounds if entry.start < 60)]
    ends = {sum(blocks[:i]) for i in range(len(blocks) + 1)}
    at = 0
    for delta in deltas:
        at += len(delta.token_ids)
        assert at in ends
    assert max(blocks) > 1


def test_a_prompt_that_is_computed_in_chunks(engine, run, model):
    prompt = [3 + (7 * i) % 300 for i in range(300)]
    got = run(sample(engine, prompt, temperature=0, max_new_tokens=30))
    assert got.token_ids == greedy(model, prompt, 30)


def test_statistics_are_those_of_the_requests(engine, run):
    before = run(engine.speculation_stats())
    got = run(sample(engine, PROMPTS[0], max_new_tokens=50, temperature=0.5, ignore_eos=True))
    after = run(engine.speculation_stats())
    assert after.rounds - before.rounds == after.requests - before.requests == got.spec.verify_steps
    assert after.drafted - before.drafted == got.spec.drafted
    assert after.emitted - before.emitted >= 49  # the last round may have been cut
    assert after.forward_seconds > before.forward_seconds


@torch.no_grad()
def exact_law(model, prompt, length, **law):
    """{tokens: probability} of the first `length` tokens, by enumeration of the final law's support."""
    found = {(): 1.0}
    for _ in range(length):
        prefixes = list(found)
        logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1].double()
        found = {
            (*prefix, v): found[prefix] * p
            for prefix, row in zip(prefixes, logits, strict=True)
            for v, p in naive_law(row, **law).items()
        }
    return found


@pytest.mark.parametrize(
    ("law", "length", "draws"),
    [
        ({}, 2, 2000),
        ({"temperature": 0.7, "top_p": 0.9}, 2, 2000),
        ({"temperature": 0.9, "top_k": 4}, 4, 3000),
        ({"temperature": 0.7, "min_p": 0.25}, 4, 2000),
    ],
)
def test_sequences_follow_the_law(engine, run, model, law, length, draws):
    """The first token comes from the prefill and the others from verified trees, some of them accepted drafts."""
    prompt = PROMPTS[1]

    async def go():
        requests = (sample(engine, prompt, max_new_tokens=length, ignore_eos=True, **law) for _ in range(draws))
        return await asyncio.gather(*requests)

    completions = run(go(), timeout=200)
    exact = exact_law(model, prompt, length, **law)
    for start in range(length):  # every token alone, then every token with the ones before it
        for first in {start, 0}:
            cells: dict[tuple[int, ...], float] = {}
            for tokens, p in exact.items():
                cells[tokens[first : start + 1]] = cells.get(tokens[first : start + 1], 0.0) + p
            where = {tokens: i for i, tokens in enumerate(cells)}
            counts = torch.zeros(len(cells), dtype=torch.int64)
            for completion in completions:
                counts[where[completion.token_ids[first : start + 1]]] += 1
            assert chi_square_p(counts, torch.tensor(list(cells.values()), dtype=torch.float64)) > 1e-4
    assert sum(c.spec.accepted for c in completions) > 0.1 * draws


@pytest.mark.parametrize(
    "law",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_logprobs_are_those_of_the_final_law(engine, run, model, law):
    got = run(sample(engine, PROMPTS[0], max_new_tokens=100, ignore_eos=True, **law))
    assert len(got.token_ids) == 100
    assert_adds_up(got)
    rows = forced_logits(model, PROMPTS[0], got.token_ids)
    assert_logprobs_follow(rows, got.token_ids, got.logprobs, law, tolerance=1e-3)


@pytest.mark.parametrize("retracted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    ("sglang", "naive"),
    [
        ({"frequency_penalty": 0.8, "presence_penalty": 0.5}, {"frequency": 0.8, "presence": 0.5}),
        ({"repetition_penalty": 1.3}, {"repetition": 1.3}),
        ({"logit_bias": ((40, 3.0), (41, -2.0))}, {"bias": ((40, 3.0), (41, -2.0))}),
    ],
)
def test_penalties_and_bias_count_the_path_to_every_node(
    engine, run, model, tiny_dir, sglang, naive, temperature, retracted
):
    async def go():
        request = asyncio.ensure_future(
            sample(engine, PROMPTS[0], max_new_tokens=120, ignore_eos=True, temperature=temperature, **sglang)
        )
        if retracted:
            await until_sampling(engine)
            await engine.update_policy(tiny_dir, 1, pause_mode="retract")
        return await request

    got = run(go())
    assert got.spec.accepted > 0
    rows = forced_logits(model, PROMPTS[0], got.token_ids)
    for i, (row, token, logprob) in enumerate(zip(rows, got.token_ids, got.logprobs, strict=True)):
        logits = penalised(row, list(got.token_ids[:i]), **naive)
        if temperature == 0:
            assert int(logits.argmax()) == token, i
        else:
            assert float(torch.log_softmax(logits / temperature, 0)[token]) == pytest.approx(logprob, abs=1e-3), i


def test_a_seed_gives_the_tokens_of_plain_decoding_whatever_was_drafted(engine, run, model):
    law = {"temperature": 0.8, "top_k": 4}

    async def crowd():
        noise = [sample(engine, [7, i], max_new_tokens=30) for i in range(6)]
        return (await asyncio.gather(sample(engine, PROMPTS[0], max_new_tokens=40, seed=11, **law), *noise))[0]

    got = run(crowd())
    assert got.spec.accepted > 0
    tokens = []
    for _ in got.token_ids:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0], *tokens]])).logits[:, -1]
        position = torch.tensor([len(PROMPTS[0]) + len(tokens) - 1])
        u = uniforms(torch.tensor([11]), position, Stream.VERIFY, 1)[:, 0]
        tokens.append(int(draw(final_logprobs(logits, LawParams.build([0.8], [4])).exp(), u)))
    assert got.token_ids == tuple(tokens)


def test_stops_and_caps_cut_a_block_where_plain_decoding_ends(engine, run, model, tiny_dir):
    from transformers import AutoTokenizer

    tokens = greedy(model, PROMPTS[3], 40)
    assert len(tokens) == 40
    firsts = [i for i in range(1, 40) if tokens[i] not in tokens[:i]][:12]
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    texts = {}
    for i in range(2, 30):
        text = tokenizer.decode(tokens[i : i + 2])
        if text.isascii() and text.strip() and len(texts) < 8:
            texts[text] = next(n for n in range(1, 41) if text in tokenizer.decode(tokens[:n]))
    assert texts

    async def go():
        def one(**limit):
            return sample(engine, PROMPTS[3], temperature=0, **{"max_new_tokens": 40, **limit})

        caps = await asyncio.gather(*(one(max_new_tokens=n) for n in range(1, 17)))
        ids = await asyncio.gather(*(one(stop_token_ids=(tokens[i],)) for i in firsts))
        strings = await asyncio.gather(*(one(stop=(text,)) for text in texts))
        return caps, ids, strings

    caps, ids, strings = run(go())
    for n, got in enumerate(caps, 1):
        assert (got.finish_reason, got.token_ids) == (FinishReason.LENGTH, tokens[:n])
    for i, got in zip(firsts, ids, strict=True):
        assert (got.finish_reason, got.token_ids) == (FinishReason.STOP, tokens[: i + 1])
    for end, got in zip(texts.values(), strings, strict=True):
        assert (got.finish_reason, got.token_ids) == (FinishReason.STOP, tokens[:end])
    assert max(len(got.spec.accepted_by_depth) for got in (*caps, *ids, *strings)) > 1
    for got in (*caps, *ids, *strings):
        assert len(got.logprobs) == len(got.token_ids)
        assert_adds_up(got)


def test_where_a_stop_and_a_cap_fall_into_one_block_the_first_ends_it(engine, run, model, tiny_dir):
    from transformers import AutoTokenizer

    tokens = greedy(model, PROMPTS[3], 40)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    shown = [tokenizer.decode(tokens[:n]) for n in range(41)]
    firsts = [i for i in range(4, 30) if tokens[i] not in tokens[:i]][:3]
    # Sampling parameters, and where plain decoding would end without a cap.
    stops = [({"stop_token_ids": (tokens[i],)}, i + 1) for i in firsts]
    for i in range(4, 30, 5):
        text = tokenizer.decode(tokens[i : i + 2])
        if text.isascii() and text.strip():
            end = next(n for n in range(1, 41) if text in shown[n])
            later = next((n for n in range(end, 40) if tokens[n] not in tokens[:n]), None)
            stops.append(({"stop": (text,)}, end))
            if later is not None:  # a string and, behind it, a token
                stops.append(({"stop": (text,), "stop_token_ids": (tokens[later],)}, end))
    assert any(len(limits) == 2 for limits, _ in stops)
    cases = [(limits, end, cap) for limits, end in stops for cap in range(max(1, end - 3), end + 5)]

    async def go():
        return await asyncio.gather(
            *(sample(engine, PROMPTS[3], temperature=0, max_new_tokens=cap, **limits) for limits, _, cap in cases)
        )

    cut_inside = 0
    for (limits, end, cap), got in zip(cases, run(go()), strict=True):
        expected = (FinishReason.STOP, tokens[:end]) if end <= cap else (FinishReason.LENGTH, tokens[:cap])
        assert (got.finish_reason, got.token_ids) == expected, (limits, end, cap)
        assert len(got.logprobs) == len(got.token_ids)
        cut_inside += len(got.token_ids) < 1 + got.spec.verify_steps + got.spec.accepted
    assert cut_inside


def test_greedy_and_sampled_requests_share_a_batch(engine, run, model):
    laws = [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.5, "repetition_penalty": 1.2}]

    async def go():
        return await asyncio.gather(
            *(sample(engine, p, max_new_tokens=30 + 7 * i, **laws[i % 4]) for i, p in enumerate(PROMPTS * 6))
        )

    for i, got in enumerate(run(go())):
        prompt, law = (PROMPTS * 6)[i], laws[i % 4]
        assert_adds_up(got)
        if law == {"temperature": 0}:
            assert got.token_ids == greedy(model, prompt, 30 + 7 * i)
        elif "repetition_penalty" not in law:
            rows = forced_logits(model, prompt, got.token_ids)
            assert_logprobs_follow(rows, got.token_ids, got.logprobs, law, tolerance=1e-3)


def test_requests_that_outgrow_the_cache_are_retracted_and_finish(engine, run, model):
    prompts = [[9, 20 + i] for i in range(16)]
    # Without ignore_eos SGLang hopes that some requests end early, and admits more than fit.
    never = {"max_new_tokens": 500, "logit_bias": ((EOS_ID, -1e4),)}

    async def go():
        return await asyncio.gather(*(sample(engine, p, temperature=0, **never) for p in prompts))

    expected = model.generate(
        torch.tensor(prompts), do_sample=False, max_new_tokens=500, suppress_tokens=[EOS_ID], pad_token_id=0
    )
    completions = run(go(), timeout=120)
    assert [list(c.token_ids) for c in completions] == expected[:, 2:].tolist()
    # A prefill after a retraction emits a token that no round accounts for.
    assert any(
        later[0] > start + accepted + 1
        for completion in completions
        for (start, _, accepted, _), later in pairwise(completion.rounds)
    )


def test_what_rounds_have_kept_serves_as_a_prefix(engine, run, model):
    prompt = list(range(130, 150))
    first = run(sample(engine, prompt, temperature=0, ignore_eos=True, max_new_tokens=80))
    assert any(0 < r.accepted < r.drafted for r in first.rounds), "no path was picked out of a tree"
    longer = [*prompt, *first.token_ids[:70]]
    again = run(sample(engine, longer, temperature=0, ignore_eos=True, max_new_tokens=40))
    assert again.cached_tokens >= 64
    assert again.token_ids == greedy_ignoring_eos(model, longer, 40)


def test_a_request_may_fill_the_context(engine, run):
    got = run(sample(engine, [1, 5] * 495, temperature=0, ignore_eos=True, max_new_tokens=32))
    assert len(got.token_ids) == 32


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_a_policy_update_keeps_requests(engine, run, other_model, other_tiny_dir, pause_mode):
    prompts = [[*range(60, 90), i] for i in range(6)]

    async def go():
        requests = [
            asyncio.ensure_future(sample(engine, p, max_new_tokens=200, ignore_eos=True, temperature=0))
            for p in prompts
        ]
        await until_sampling(engine)
        report = await engine.update_policy(other_tiny_dir, 5, pause_mode=pause_mode)
        after = await sample(engine, [8, 9], max_new_tokens=20, temperature=0, ignore_eos=True)
        return report, after, await asyncio.gather(*requests)

    report, after, crossed = run(go())
    assert report.in_flight == len(prompts)
    assert after.token_ids == greedy_ignoring_eos(other_model, [8, 9], 20)
    for prompt, got in zip(prompts, crossed, strict=True):
        assert len(got.token_ids) == len(got.logprobs) == 200
        assert [span.version for span in got.policy_version_spans] == [0, 5]
        change = got.policy_version_spans[1].start
        if pause_mode == "retract":
            continued = greedy_ignoring_eos(other_model, [*prompt, *got.token_ids[:change]], 200 - change)
            assert got.token_ids[change:] == continued


def test_an_aborted_request_returns_what_it_has(engine, run):
    async def go():
        got, stream = [], engine.stream([1, 2], SamplingParams(max_new_tokens=900, ignore_eos=True), request_id="cut")
        async for delta in stream:
            got += delta.token_ids
            if len(got) >= 5 and delta.completion is None:
                await engine.abort("cut")
        return got, delta.completion

    got, completion = run(go())
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == tuple(got)
    assert 5 <= len(got) < 900
    assert len(completion.logprobs) == len(got)


@pytest.mark.engine
def test_whatever_widths_the_measured_times_choose(run, model, tiny_dir, tmp_path):
    """Widths change from step to step, plain steps among them."""
    heads = make_tiny_heads(model, PROMPTS, tmp_path / "heads.safetensors")
    speculation = SpeculationConfig(enabled=True, heads=heads, max_nodes=8)
    config = EngineConfig(threads=1, context_length=512, max_total_tokens=4096, speculation=speculation)
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    try:

        async def go():
            exact = [sample(engine, p, temperature=0, max_new_tokens=100) for p in PROMPTS]
            drawn = [sample(engine, p, max_new_tokens=100, ignore_eos=True) for p in PROMPTS]
            return await asyncio.gather(*exact), await asyncio.gather(*drawn)

        exact, drawn = run(go())
        stats = run(engine.speculation_stats())
    finally:
        engine.close()
    assert 0 < stats.drafted < 7 * stats.requests
    for prompt, got in zip(PROMPTS, exact, strict=True):
        assert got.token_ids == greedy(model, prompt, 100)
    for prompt, got in zip(PROMPTS, drawn, strict=True):
        law = torch.log_softmax(forced_logits(model, prompt, got.token_ids), -1)
        expected = law.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(got.logprobs).double(), atol=1e-3)
