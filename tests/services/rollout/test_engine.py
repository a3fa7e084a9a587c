"""The real engine on the tiny model against plain `transformers` in float32."""

from __future__ import annotations

import asyncio
import math
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from services.rollout.engine import RolloutEngine
from specroll_core.contracts import FinishReason, SamplingParams, VersionSpan

pytestmark = pytest.mark.engine
_ids = count()
PROMPTS = [[1, 87, 307, 84, 201], [1, 10, 11, 12], [5], list(range(30, 100)), [1, 87, 307, 84, 9, 8]]


def load(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir)


@pytest.fixture(scope="module")
def other_model(other_tiny_dir):
    return load(other_tiny_dir)


def sample(engine: RolloutEngine, prompt, **sampling):
    return engine.generate(prompt, SamplingParams(**sampling), request_id=f"t{next(_ids)}")


def greedy(model, prompt, steps):
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=steps, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


@torch.no_grad()
def forced_logits(model, prompt, tokens):
    return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()


def naive_law(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """One row's final law, token by token in float64."""
    p = torch.softmax(logits / temperature, 0)
    kept, before = {}, 0.0
    ranked = sorted(range(len(p)), key=lambda v: (-float(p[v]), v))
    for rank, v in enumerate(ranked):
        if (top_k == -1 or rank < top_k) and before <= top_p and p[v] >= min_p * p[ranked[0]]:
            kept[v] = float(p[v])
        before += float(p[v])
    total = sum(kept.values())
    return {v: q / total for v, q in kept.items()}


def assert_logprobs_follow(rows, tokens, logprobs, law, tolerance):
    """That the law of each row gives its token that log-probability. Where the mass before a token is top_p to within
    rounding, either decision about this token is right."""
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        top_p = law.get("top_p", 1.0)
        edges = (top_p,) if top_p == 1 else (top_p, top_p - 1e-5, top_p + 1e-5)
        right = [naive_law(row, **(law | {"top_p": edge})).get(token, 0.0) for edge in edges]
        assert min(abs(math.log(p) - logprob) for p in right if p) < tolerance


def test_greedy_equals_transformers_alone_and_in_a_batch(engine, run, model):
    async def together():
        return await asyncio.gather(*(sample(engine, p, temperature=0, max_new_tokens=40) for p in PROMPTS))

    alone = [run(sample(engine, p, temperature=0, max_new_tokens=40)) for p in PROMPTS]
    for prompt, one, many in zip(PROMPTS, alone, run(together()), strict=True):
        assert one.token_ids == many.token_ids == greedy(model, prompt, 40)
        assert set(one.logprobs) == {0.0}
        assert one.policy_version_spans == (VersionSpan(0, 0, len(one.token_ids)),)


@pytest.mark.parametrize(
    "law",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.7},
        {"top_k": 7},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_logprobs_are_those_of_the_final_law(engine, run, model, law):
    got = run(sample(engine, PROMPTS[0], max_new_tokens=60, ignore_eos=True, **law))
    rows = forced_logits(model, PROMPTS[0], got.token_ids)
    assert_logprobs_follow(rows, got.token_ids, got.logprobs, law, tolerance=2e-4)


def test_first_tokens_follow_the_law(engine, run, model):
    law = {"temperature": 0.9, "top_k": 6}
    draws = 600

    async def draw():
        requests = (sample(engine, PROMPTS[1], max_new_tokens=1, seed=seed, **law) for seed in range(draws))
        return await asyncio.gather(*requests)

    tokens = [c.token_ids[0] for c in run(draw(), timeout=120)]
    expected = naive_law(forced_logits(model, PROMPTS[1], [0])[0], **law)
    assert set(tokens) <= set(expected)
    chi2 = sum((tokens.count(v) - draws * q) ** 2 / (draws * q) for v, q in expected.items())
    assert chi2 < 25.7  # the 1e-4 tail at 5 degrees of freedom


def test_a_seed_decides_the_tokens_whatever_the_batch(engine, run):
    async def crowd():
        noise = [sample(engine, [7, i], max_new_tokens=30) for i in range(6)]
        return (await asyncio.gather(sample(engine, PROMPTS[0], max_new_tokens=30, seed=11), *noise))[0]

    alone = run(sample(engine, PROMPTS[0], max_new_tokens=30, seed=11))
    assert run(crowd()).token_ids == alone.token_ids
    assert run(sample(engine, PROMPTS[0], max_new_tokens=30, seed=12)).token_ids != alone.token_ids
    assert run(sample(engine, PROMPTS[0], max_new_tokens=30)).token_ids != alone.token_ids


def penalised(logits, history, bias=(), repetition=1.0, frequency=0.0, presence=0.0):
    """Bias and penalties as SGLang defines them, over the tokens sampled so far."""
    logits = logits.clone()
    for v in set(history):
        logits[v] -= frequency * history.count(v) + presence
        if repetition != 1.0:
            logits[v] = logits[v] * repetition if logits[v] < 0 else logits[v] / repetition
    for v, b in bias:
        logits[v] += b
    return logits


@pytest.mark.parametrize("retracted", [False, True])
@pytest.mark.parametrize(
    ("sglang", "naive"),
    [
        ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"frequency": 1.5, "presence": 0.5}),
        ({"repetition_penalty": 1.7}, {"repetition": 1.7}),
        ({"logit_bias": ((40, 3.0), (41, -2.0))}, {"bias": ((40, 3.0), (41, -2.0))}),
    ],
)
def test_penalties_and_bias_belong_to_the_law_even_across_a_retraction(
    engine, run, model, tiny_dir, sglang, naive, retracted
):
    async def go():
        request = asyncio.ensure_future(
            sample(engine, PROMPTS[0], max_new_tokens=150, ignore_eos=True, temperature=0.5, **sglang)
        )
        if retracted:
            await until_sampling(engine)
            await engine.update_policy(tiny_dir, 1, pause_mode="retract")
        return await request

    got = run(go())
    if retracted:
        assert [span.version for span in got.policy_version_spans] == [0, 1]
    rows = forced_logits(model, PROMPTS[0], got.token_ids)
    for i, (row, logprob) in enumerate(zip(rows, got.logprobs, strict=True)):
        law = torch.log_softmax(penalised(row, list(got.token_ids[:i]), **naive) / 0.5, 0)
        assert float(law[got.token_ids[i]]) == pytest.approx(logprob, abs=5e-4), i


async def until_sampling(engine, tokens=5):
    """Waits until something that is in flight has sampled a few tokens."""
    probe = engine.stream([3], SamplingParams(max_new_tokens=tokens, ignore_eos=True), request_id=f"p{next(_ids)}")
    async for _ in probe:
        pass


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_a_policy_update_keeps_requests_and_shares_no_prefix(
    engine, run, other_model, other_tiny_dir, tiny_dir, pause_mode
):
    prompts = [[*range(60, 90), i] for i in range(6)]
    warm = list(range(100, 130))  # cached under the old policy, and in no request that crosses the update

    async def go():
        await sample(engine, warm, max_new_tokens=2, temperature=0)
        assert (await sample(engine, warm, max_new_tokens=2, temperature=0)).cached_tokens > 0
        requests = [
            asyncio.ensure_future(sample(engine, p, max_new_tokens=200, ignore_eos=True, temperature=0))
            for p in prompts
        ]
        await until_sampling(engine)
        report = await engine.update_policy(other_tiny_dir, 5, pause_mode=pause_mode)
        after = await sample(engine, warm, max_new_tokens=20, temperature=0, ignore_eos=True)
        return report, after, await asyncio.gather(*requests)

    report, after, crossed = run(go())
    assert report.in_flight == len(prompts)
    assert report.pause_seconds > 0
    assert after.cached_tokens == 0
    assert after.token_ids == greedy_ignoring_eos(other_model, warm, 20)
    for prompt, got in zip(prompts, crossed, strict=True):
        assert len(got.token_ids) == len(got.logprobs) == 200
        assert [span.version for span in got.policy_version_spans] == [0, 5]
        change = got.policy_version_spans[1].start
        if pause_mode == "retract":  # from there on as the new policy continues the text, its cache recomputed
            continued = greedy_ignoring_eos(other_model, [*prompt, *got.token_ids[:change]], 200 - change)
            assert got.token_ids[change:] == continued
    # What was computed in part under the old policy is no prefix for anybody.
    mixed = [*prompts[0], *crossed[0].token_ids[:150]]
    again = run(sample(engine, mixed, max_new_tokens=10, temperature=0, ignore_eos=True))
    assert again.token_ids == greedy_ignoring_eos(other_model, mixed, 10)
    assert pause_mode == "retract" or again.cached_tokens == 0
    assert run(sample(engine, warm, max_new_tokens=2, temperature=0)).cached_tokens > 0
    run(engine.update_policy(tiny_dir, 5, pause_mode=pause_mode))  # the same version number, other weights
    assert run(sample(engine, warm, max_new_tokens=2, temperature=0)).cached_tokens == 0
    run(engine.update_policy(tiny_dir, 6, pause_mode=pause_mode))


def greedy_ignoring_eos(model, prompt, steps):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def spoil(source, target, change):
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def test_a_corrupt_policy_is_refused_and_the_old_one_serves(engine, run, model, other_tiny_dir, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"

    def poison(weights):
        weights[name][3, 3] = float("nan")

    def reshape(weights):
        weights[name] = weights[name][:-1].contiguous()

    truncated = spoil(other_tiny_dir, tmp_path / "truncated", dict)
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-100])
    cases = {
        "not finite": spoil(other_tiny_dir, tmp_path / "nan", poison),
        "of shape": spoil(other_tiny_dir, tmp_path / "shape", reshape),
        f"lacks {name}": spoil(other_tiny_dir, tmp_path / "missing", lambda w: w.pop(name)),
        "damaged or incomplete": truncated,
        "config.json": tmp_path / "absent",
    }
    for reason, directory in cases.items():
        with pytest.raises(ValueError, match=reason):
            run(engine.update_policy(directory, 9, pause_mode="in_place"))
    assert engine.policy_version == 0
    got = run(sample(engine, PROMPTS[0], temperature=0, max_new_tokens=30))
    assert got.token_ids == greedy(model, PROMPTS[0], 30)


@pytest.mark.parametrize(
    ("field", "prompt", "sampling"),
    [
        ("prompt_ids", [], {}),
        ("prompt_ids", [320], {}),
        ("max_new_tokens", [1] * 1000, {"max_new_tokens": 25}),
        ("stop_token_ids", [1], {"stop_token_ids": (400,)}),
        ("logit_bias", [1], {"logit_bias": ((-1, 1.0),)}),
        ("stop must", [1], {"stop": tuple("abcdefghijklmnopqrstuvwxyz0123456789")}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine, run, field, prompt, sampling):
    with pytest.raises(ValueError, match=field):
        run(sample(engine, prompt, **sampling))


def test_an_aborted_request_returns_what_it_has(engine, run):
    async def go():
        got, stream = [], engine.stream([1, 2], SamplingParams(max_new_tokens=900, ignore_eos=True), request_id="cut")
        async for delta in stream:
            got += delta.token_ids
            if len(got) >= 5:  # several come at once where this process is slower than the engine
                await engine.abort("cut")
        return got, delta.completion

    got, completion = run(go())
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == tuple(got)
    assert 5 <= len(got) < 900
    assert len(completion.logprobs) == len(got)


def test_a_request_whose_caller_left_is_aborted(engine, run):
    async def go():
        stream = engine.stream([1, 2], SamplingParams(max_new_tokens=900, ignore_eos=True), request_id="left")
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.ensure_future(sample(engine, [1, 2], max_new_tokens=900, ignore_eos=True))
        await until_sampling(engine)
        task.cancel()
        await asyncio.wait({task})
        return await engine.status()

    status = run(go())
    assert (status.running, status.waiting, status.alive) == (0, 0, True)


def test_finishing_by_stop_token_stop_string_and_length(engine, run, model, tiny_dir):
    from transformers import AutoTokenizer

    tokens = greedy(model, PROMPTS[3], 30)
    assert len(tokens) == 30
    by_length = run(sample(engine, PROMPTS[3], temperature=0, max_new_tokens=30))
    assert (by_length.finish_reason, by_length.token_ids) == (FinishReason.LENGTH, tokens)
    at = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    by_token = run(sample(engine, PROMPTS[3], temperature=0, max_new_tokens=30, stop_token_ids=(tokens[at],)))
    assert (by_token.finish_reason, by_token.token_ids) == (FinishReason.STOP, tokens[: at + 1])
    assert len(by_token.logprobs) == at + 1
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    printable = next(
        i
        for i in range(2, 29)
        if tokenizer.decode(tokens[i : i + 2]).isascii() and len(tokenizer.decode(tokens[i])) > 0
    )
    text = tokenizer.decode(tokens[printable : printable + 2])
    end = next(i for i in range(1, 31) if text in tokenizer.decode(tokens[:i]))
    by_string = run(sample(engine, PROMPTS[3], temperature=0, max_new_tokens=30, stop=(text,)))
    assert (by_string.finish_reason, by_string.token_ids) == (FinishReason.STOP, tokens[:end])
    assert len(by_string.logprobs) == end


def test_requests_that_come_together_compute_their_prompt_once(engine, run):
    async def together(prompts):
        four = SamplingParams(max_new_tokens=4, ignore_eos=True)
        samples = [engine.generate(p, four, request_id=f"t{next(_ids)}") for p in prompts]
        return [completion.cached_tokens for completion in await asyncio.gather(*samples)]

    # Long enough that even one request waits: the scheduler may find them in its queue in any portions. The last
    # position is always computed: the first token is sampled from it.
    assert sorted(run(together([[5, *range(10, 80)]] * 4))) == [0, 70, 70, 70]
    assert run(together([[n, *range(40, 60)] for n in range(20, 24)])) == [0] * 4


def test_a_stream_adds_up_to_its_completion(engine, run):
    async def go():
        stream = engine.stream([1, 9], SamplingParams(max_new_tokens=25, ignore_eos=True), request_id="s")
        return [delta async for delta in stream]

    deltas = run(go())
    assert [d.completion is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
    assert deltas[-1].completion.token_ids == tuple(t for d in deltas for t in d.token_ids)
    assert deltas[-1].completion.logprobs == tuple(x for d in deltas for x in d.logprobs)


def test_requests_beyond_the_batch_wait_and_finish(engine, run):
    async def go():
        requests = [
            asyncio.ensure_future(sample(engine, [1, i], max_new_tokens=20, ignore_eos=True)) for i in range(40)
        ]
        await asyncio.sleep(0)
        status = await engine.status()
        return status, await asyncio.gather(*requests)

    status, completions = run(go())
    assert (status.running, status.waiting) == (16, 24)
    assert all(len(c.token_ids) == 20 for c in completions)


def test_mismatch_with_transformers_is_far_below_what_training_notices(engine, run, model):
    """k3 estimator of KL(engine || transformers) over sampled tokens, in float32."""
    total, tokens = 0.0, 0
    for prompt in PROMPTS:
        got = run(sample(engine, prompt, max_new_tokens=100, ignore_eos=True))
        law = torch.log_softmax(forced_logits(model, prompt, got.token_ids), -1)
        log_ratio = law.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0] - torch.tensor(got.logprobs).double()
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
        tokens += len(got.token_ids)
    assert total / tokens < 1e-5


def test_a_request_gets_all_the_tokens_that_its_context_leaves_and_no_more_are_promised(engine, run):
    prompt = [1, *([7] * 989)]
    done = run(sample(engine, prompt, max_new_tokens=32, ignore_eos=True))
    assert len(done.token_ids) == 32
    with pytest.raises(ValueError, match="exceeds the 32 tokens"):
        run(sample(engine, prompt, max_new_tokens=33))


def test_another_engine_with_speculation_in_this_process_does_no_harm(engine, run, model, monkeypatch):
    # What SGLang looks up for all engines of a process, once such a one has started.
    theirs = SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
    monkeypatch.setattr("sglang.srt.managers.tokenizer_manager.get_spec", lambda: theirs)
    got = run(sample(engine, PROMPTS[0], temperature=0, max_new_tokens=8, ignore_eos=True))
    assert got.token_ids == greedy_ignoring_eos(model, PROMPTS[0], 8)
