"""Rollouts at several temperatures: the same prompts in each, the same rows whether one process samples or two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.config import Config
from services.heads import parallel, rollouts
from services.heads.auto import cached_heads, ensure_heads
from services.heads.collect import join, pack, sample_completions, unpack
from services.heads.parallel import sample_in_processes
from services.heads.rollouts import chain, first_rows, hold_out, sample_rollouts
from services.rollout.heads_file import load_heads
from specroll_core.contracts import SamplingParams

PROMPTS = [(20 + i, 200 + i) for i in range(12)]
LAWS = [SamplingParams(temperature=t, max_new_tokens=10) for t in (1.0, 0.0)]


def same(left, right):
    return all(
        torch.equal(getattr(left, name), getattr(right, name))
        for name in ("tokens", "hidden", "target_ids", "target_logprobs", "sequence", "prompt")
    )


@pytest.fixture(scope="module")
def config(tiny_dir):
    return Config.model_validate(
        {"model": {"source": str(tiny_dir), "dtype": "float32"}, "sampling": {"temperature": 0.8, "max_new_tokens": 10}}
    )


@pytest.fixture(scope="module")
def sampled(config, target):
    return sample_rollouts(config, target, PROMPTS, tokens=250, seed=4)


def test_every_prompt_is_completed_at_every_temperature(sampled, target):
    assert list(sampled) == [1.0, 0.8, 0.6]
    assert sum(map(len, sampled.values())) >= 250
    prompts = [set(rows.prompt.tolist()) for rows in sampled.values()]
    assert prompts[0] == prompts[1] == prompts[2]
    # What is kept of a law is at temperature 1, whatever was drawn from it.
    rows = sampled[0.6]
    logits = rows.hidden @ target.lm_head.T
    torch.testing.assert_close(
        rows.target_logprobs, logits.log_softmax(-1).gather(1, rows.target_ids), atol=1e-4, rtol=1e-4
    )


def test_the_same_prompts_are_held_out_at_every_temperature(sampled):
    training, held = hold_out(sampled, 0.25, 0)
    together = chain(sampled)
    assert len(chain(training)) + len(chain(held)) == len(together)
    assert not set(chain(training).prompt.tolist()) & set(chain(held).prompt.tolist())
    assert len({tuple(rows.prompt.unique().tolist()) for rows in held.values()}) == 1
    # Sequences stay apart.
    counts = [len(rows.sequence.unique()) for rows in sampled.values()]
    assert len(together.sequence.unique()) == sum(counts)
    for sequence in together.sequence.unique().tolist():
        where = (together.sequence == sequence).nonzero().squeeze(1)
        assert int(where[-1] - where[0]) + 1 == len(where)


def test_the_first_rows_are_whole_trajectories(sampled):
    rows = sampled[1.0]
    some = first_rows(rows, 15)
    assert 15 <= len(some) < 25
    assert int(some.sequence[-1]) != int(rows.sequence[len(some)])
    assert len(first_rows(rows, 10**6)) == len(rows)


def test_packing_is_undone_by_unpacking(target):
    made = sample_completions(target, PROMPTS, LAWS)
    assert same(join(unpack(pack(made)), target.device), join(made, target.device))
    assert [one.law for one in unpack(pack(made))] == [one.law for one in made]


def test_processes_sample_what_one_would(target, tiny_dir):
    """Greedily, so that seeds do not matter."""
    seen: list[int] = []
    greedy = LAWS[1:]
    made = sample_in_processes(tiny_dir, "float32", PROMPTS, greedy, tokens=60, processes=2, progress=seen.append)
    expected = {one.prompt: one.tokens.tolist() for one in sample_completions(target, PROMPTS, greedy)}
    assert {one.prompt % 2 for one in made} == {0, 1}
    assert all(one.tokens.tolist() == expected[one.prompt] for one in made)
    assert max(seen) >= 60 - 1
    assert max(seen) == sum(len(one.tokens) for one in made)


def test_a_process_that_fails_is_quoted(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 1; its last words(.|\n)*config.json"):
        sample_in_processes(tmp_path, "float32", PROMPTS, LAWS, tokens=10, processes=1)


def test_many_tokens_are_sampled_in_processes(config, target, monkeypatch):
    asked = []
    monkeypatch.setattr(
        rollouts, "sample_in_processes", lambda *_, processes, **__: asked.append(processes) or
        sample_completions(target, PROMPTS, [LAWS[0]] * 3)
    )  # fmt: skip
    sample_rollouts(config, target, PROMPTS, tokens=3 * parallel.WORTH_A_PROCESS, threads=2)
    sample_rollouts(config, target, PROMPTS, tokens=50, threads=2)
    assert asked == [2]


def test_a_run_trains_its_heads_once(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECROLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "config.toml"
    path.write_text(f"""
        [model]
        source = "{tiny_dir}"
        dtype = "float32"
        [data]
        size = 30
        holdout = 5
        [sampling]
        max_new_tokens = 8
        [heads]
        init = "auto"
        heads = 2
        rank = 4
    """)
    from services.config_loader import load_config

    loaded = load_config(path, [])
    made = ensure_heads(loaded, path, [], tokens=150)
    assert made.parent == tmp_path / "cache" / "heads"
    heads = load_heads(made)
    assert (heads.spec.heads, heads.spec.rank) == (2, 4)
    assert heads.vocabulary is not None
    stamp = (made / "manifest.json").stat().st_mtime_ns
    assert ensure_heads(loaded, Path("absent.toml"), [], tokens=150) == made  # nothing is run
    assert (made / "manifest.json").stat().st_mtime_ns == stamp
    # Whatever the heads depend on is another place.
    for changed in (["sampling.temperature=0.7"], ["data.size=31"], ["heads.rank=5"], ["run.seed=1"]):
        assert cached_heads(load_config(path, changed)) != made
    assert cached_heads(load_config(path, ["learner.steps=9", "run.dir=elsewhere"])) == made
