"""Training on a few hundred rows beats not training, and ranking few tokens is the same loss on what is kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from services.cli import app
from services.heads.artifact import load_artifact
from services.heads.collect import sample_rows
from services.heads.fingerprint import ModelFingerprint
from services.heads.report import acceptances, as_json, from_json, interval
from services.heads.target import TargetModel
from services.heads.train import by_frequency, frequent_tokens, restrict, train
from specroll_core.contracts import SamplingParams
from specroll_core.head_training import HeadTrainConfig, head_kl
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from specroll_core.replay import AcceptanceReport

LAW = SamplingParams(temperature=0.6, max_new_tokens=40)
PROMPTS = [(20 + i, 200 + i) for i in range(20)]


@pytest.fixture(scope="module")
def rows(target):
    return sample_rows(target, PROMPTS, LAW, tokens=700, seed=5)


@pytest.fixture(scope="module")
def fluent(tiny_dir):
    """The tiny model after some lessons in a language of 24 words, where each mostly calls for one other. A random
    model's next tokens but one cannot be guessed from any state."""
    target = TargetModel(tiny_dir, torch.float32, torch.device("cpu"))
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        words = [torch.randint(24, (16,), generator=generator)]
        for _ in range(15):
            slip = torch.rand(16, generator=generator) < 0.1
            words.append(torch.where(slip, torch.randint(24, (16,), generator=generator), (words[-1] * 5 + 3) % 24))
        ids = 100 + torch.stack(words, 1)
        optimizer.zero_grad()
        target.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return target


def test_the_vocabulary_is_ordered_by_expected_frequency(rows):
    expected = torch.zeros(320)
    for ids, logprobs in zip(rows.target_ids, rows.target_logprobs, strict=True):
        for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
            expected[token] += math.exp(logprob)
    ids = by_frequency(rows, 320)
    assert set(ids.tolist()) == set(expected.nonzero().squeeze(1).tolist())
    assert bool((expected[ids].diff() <= 1e-4).all())


def test_trained_heads_beat_untrained_ones_on_prompts_they_have_not_seen(fluent):
    prompts = [(100 + i, 100 + i // 2) for i in range(24)]
    rows = sample_rows(fluent, prompts, SamplingParams(temperature=1.0, max_new_tokens=30), tokens=600, seed=5)
    kept, held_out = rows.split_by_prompt(0.2, 0)
    config = HeadTrainConfig(epochs=12, learning_rate=5e-3, batch_rows=64)
    made = train(kept, held_out, fluent.lm_head, fluent.embedding, rank=32, config=config)
    assert all(a < 0.7 * b for a, b in zip(made.report.heldout_after, made.report.heldout_before, strict=True))
    fresh = FutureTokenHeads(HeadsSpec(3, 64, 32, 320))
    rollouts = {1.0: held_out}
    trained, untrained = (
        list(acceptances(heads, rollouts, fluent.lm_head, fluent.embedding, nodes=(4, 8)))
        for heads in (made.heads, fresh)
    )
    assert [(a.rule, a.nodes) for a in trained] == [
        ("target_match", 4),
        ("target_match", 8),
        ("sampled_child", 4),
        ("sampled_child", 8),
    ]
    for ours, theirs in zip(trained, untrained, strict=True):
        assert ours.tokens_per_step > 1.3 * theirs.tokens_per_step
        assert ours.low <= ours.tokens_per_step <= ours.high
    assert from_json(json.loads(json.dumps(as_json(trained)))) == trained


def test_the_restricted_loss_is_the_full_one_on_the_kept_tokens(target, rows):
    """Against the whole LM head with the other columns masked out and their targets taken away."""
    ids = frequent_tokens(rows, 320, 40)
    kept, share = restrict(rows, ids, 320)
    torch.manual_seed(0)
    heads = FutureTokenHeads(HeadsSpec(3, 64, 16, 320))
    with torch.no_grad():
        heads.up.normal_(std=0.1)
    index = torch.arange(0, len(rows), 7)
    got = head_kl(heads, kept, index, target.lm_head[ids], target.embedding)
    inside = torch.zeros(320, dtype=torch.bool)
    inside[ids] = True
    mass = kept_mass = 0.0
    for i in range(len(rows)):
        for token, logprob in zip(rows.target_ids[i].tolist(), rows.target_logprobs[i].tolist(), strict=True):
            mass += torch.tensor(logprob).exp().item()
            kept_mass += torch.tensor(logprob).exp().item() if inside[token] else 0.0
    assert share == pytest.approx(kept_mass / mass, rel=1e-4)
    for n, i in enumerate(index.tolist()):
        z = heads(rows.hidden[i : i + 1], target.embedding[rows.tokens[i : i + 1]])[0]
        log_q = (z @ target.lm_head.T).masked_fill(~inside, -torch.inf).log_softmax(-1)
        for k in range(3):
            j = i + k + 1
            if j >= len(rows) or rows.sequence[j] != rows.sequence[i]:
                assert float(got[n, k].detach()) == 0
                continue
            there = inside[rows.target_ids[j]]
            p = rows.target_logprobs[j][there].softmax(-1)
            expected = (p * (p.log() - log_q[k, rows.target_ids[j][there]])).sum()
            torch.testing.assert_close(got[n, k], expected, atol=1e-4, rtol=1e-4)


def test_keeping_everything_changes_nothing(target, rows):
    kept, share = restrict(rows, frequent_tokens(rows, 320, 320), 320)
    assert share == 1
    assert torch.equal(kept.target_ids, rows.target_ids)
    assert torch.equal(kept.target_logprobs, rows.target_logprobs)


def test_frequent_tokens_leave_every_law_something(rows):
    ids = frequent_tokens(rows, 320, 3)
    assert torch.isin(rows.target_ids[:, 0], ids).all()
    mass = torch.zeros(320)
    for i in range(len(rows)):
        mass[rows.target_ids[i]] += rows.target_logprobs[i].exp()
    assert torch.isin(mass.topk(3).indices, ids).all()
    assert ids.tolist() == sorted(set(ids.tolist()))


def test_the_interval_covers_the_mean_of_prompts_that_differ():
    same = AcceptanceReport(40, 20.0, dict.fromkeys(range(4), (10, 5.0)), ())
    assert interval(same) == (2.0, 2.0)
    spread = AcceptanceReport(40, 20.0, {i: (10, 4.0 + 2 * (i % 2)) for i in range(40)}, ())
    low, high = interval(spread)
    assert 10 / 6 < low < 2 < high < 10 / 4


@pytest.fixture
def config(tiny_dir, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(f"""
        [model]
        source = "{tiny_dir}"
        dtype = "float32"
        [data]
        size = 40
        holdout = 10
        [sampling]
        max_new_tokens = 20
        [run]
        dir = "{tmp_path / "run"}"
    """)
    return path


def cli(*words):
    return CliRunner().invoke(app, ["heads", *map(str, words)])


def test_the_commands_train_show_and_measure(config, tiny_dir, tmp_path):
    out = tmp_path / "made" / "heads"
    done = cli("train", config, "--out", out, "--tokens", 200, "--rank", 8, "--epochs", 2, "--threads", 1)
    assert done.exit_code == 0, done.output
    loaded = load_artifact(out, ModelFingerprint.of(tiny_dir))
    assert sorted(path.name for path in out.parent.iterdir()) == ["heads"]
    assert loaded.manifest.trained_on.source == "reasoning-gym:basic_arithmetic"
    measured = from_json(loaded.manifest.gate["acceptance"])
    assert {(a.temperature, a.nodes) for a in measured} == {(t, n) for t in (1.0, 0.6) for n in (4, 8, 16)}
    assert all(a.tokens_per_step >= 1 for a in measured)

    shown = cli("show", out)
    assert shown.exit_code == 0
    assert "low-rank-residual-with-embedding" in shown.output
    evaluated = cli("eval", out, config, "--tokens", 60, "--threads", 1)
    assert evaluated.exit_code == 0, evaluated.output
    assert "sampled_child" in evaluated.output


def test_training_on_texts(config, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"text number {i} of many"}) + "\n" for i in range(30)))
    out = tmp_path / "heads"
    done = cli("train", config, "--out", out, "--texts", texts, "--tokens", 200, "--rank", 8, "--threads", 1)
    assert done.exit_code == 0, done.output
    trained_on = load_artifact(out).manifest.trained_on
    assert (trained_on.source, trained_on.temperature) == ("texts.jsonl", None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--out", "{tmp}/config.toml"], "exists already"),
        (["--out", "{tmp}/new", "--tokens", "0"], "--tokens 0 must be at least 1"),
        (["--out", "{tmp}/new", "--heads", "9"], "--heads 9 must lie between 1 and 8"),
        (["--out", "{tmp}/new", "--threads", "-1"], "--threads -1"),
        (["--out", "{tmp}/new", "--texts", "{tmp}/absent.jsonl"], "absent.jsonl is not an existing file"),
        (["--out", "{tmp}/new", "--set", "sampling.temprature=1"], "did you mean sampling.temperature"),
        (["--out", "{tmp}/new", "--set", "model.source={tmp}"], "has no config.json"),
        (["--out", "{tmp}/new", "--set", "data.source=reasoning-gym:nothing"], "names no data set"),
        (["--out", "auto", "--heads", "3"], "write --set heads.heads=3 in place of --heads 3"),
        (["--out", "auto", "--rank", "8"], "write --set heads.rank=8 in place of --rank 8"),
        (["--out", "auto", "--texts", "{tmp}/config.toml"], "leave --texts out"),
        (["--out", "{tmp}/new", "--tokens", "1"], "none could be held out"),
    ],
)
def test_mistakes_take_one_sentence_and_leave_nothing(config, tmp_path, monkeypatch, words, reason):
    monkeypatch.setenv("SPECROLL_CACHE", str(tmp_path / "cache"))
    done = cli("train", config, *(word.format(tmp=tmp_path) for word in words))
    assert done.exit_code == 2
    assert reason in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_heads_of_another_model_are_not_measured_and_of_an_earlier_policy_they_are(
    config, target, other_tiny_dir, tmp_path
):
    from services.heads.artifact import HeadsManifest, TrainedOn, write_heads

    heads = FutureTokenHeads(HeadsSpec(3, 64, 8, 320))
    stranger = replace(target.fingerprint, config_sha256="0" * 64)
    write_heads(tmp_path / "stranger", heads, HeadsManifest(stranger, TrainedOn(1, 1, "test")))
    done = cli("eval", tmp_path / "stranger", config)
    assert done.exit_code == 2
    assert "another configuration" in done.stderr
    earlier = replace(target.fingerprint, lm_head_sha256=ModelFingerprint.of(other_tiny_dir).lm_head_sha256)
    write_heads(tmp_path / "earlier", heads, HeadsManifest(earlier, TrainedOn(1, 1, "test")))
    done = cli("eval", tmp_path / "earlier", config, "--tokens", 60, "--threads", 1)
    assert done.exit_code == 0, done.output
    assert "another LM head" in done.output
    assert "sampled_child" in done.output
    assert cli("show", tmp_path / "absent").exit_code == 2
