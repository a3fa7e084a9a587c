"""The whole proof on the real engine with the tiny model: it passes, and a planted bias makes it fail."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.config import Config, DataConfig
from services.lossless.commands import lossless_command, prove
from services.lossless.leaning import LogprobGap
from services.lossless.options import LosslessOptions
from services.lossless.verdict import Check, Divergence, Verdict
from services.rollout.heads_file import save_heads
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.services.rollout.test_engine import load
from tests.tiny_heads import make_tiny_heads

DATA = DataConfig(source="reasoning-gym:basic_arithmetic", size=12, holdout=0)
# A random model is certain of little.
OPTIONS = LosslessOptions(
    threads=1,
    rollout_tokens=1200,
    longest=60,
    prefixes=2,
    draws=80,
    greedy_prompts=8,
    greedy_tokens=40,
    certain=0.3,
    running=16,
)


@pytest.fixture(scope="module")
def heads(tiny_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    return make_tiny_heads(load(tiny_dir), [[5, 6], [7, 8, 9]], path)


@pytest.mark.engine
def test_the_engine_is_lossless(tiny_dir, heads, tmp_path):
    report = tmp_path / "verdict.json"
    assert lossless_command(str(tiny_dir), heads, OPTIONS, DATA, report) == 0
    found = json.loads(report.read_text())
    assert found["passed"]
    kinds = {(c["kind"], c["way"]) for c in found["checks"]}
    ways = ("plain", "target_match", "sampled_child", "speculation", "correction")
    assert kinds == {(kind, way) for kind in ("frequencies", "leaning", "betting") for way in ways}
    assert found["acceptance_length"]["plain"] == 1
    assert min(found["acceptance_length"][way] for way in ways[1:]) > 1
    assert set(found["logprobs"]) == set(ways)
    assert all(gap["tokens"] >= 4 * 1200 and gap["max"] < 1e-3 for gap in found["logprobs"].values())
    assert found["greedy"]["prompts"] == 8
    assert 0 < found["greedy"]["tokens"] <= 8 * 40


@pytest.mark.engine
def test_a_planted_bias_is_found(tiny_dir, heads):
    verdict = prove(str(tiny_dir), heads, replace(OPTIONS, planted_bias=0.02, draws=1), DATA)
    assert not verdict.passed
    assert {check.way for check in verdict.rejected} <= {"target_match", "sampled_child", "speculation", "correction"}
    # At top-p a wrong token may also be a forbidden one; the law without filters must give it away as well.
    assert any(check.law == "T=1" for check in verdict.rejected)


def verdict(**fields):
    return Verdict("m", "float32", 4, **fields)


def check(p, way="sampled_child"):
    return Check("leaning", way, "T=1", "head 1", 100, p, 1.0)


def test_what_makes_a_verdict_fail():
    assert verdict(checks=[check(0.01)] * 5, logprobs={"plain": LogprobGap(10, 1e-3, 5e-4)}).passed
    assert not verdict(checks=[check(0.5), check(1e-4)]).passed
    assert verdict(checks=[check(0.5)] * 20 + [check(1e-4)]).passed
    assert "Plain decoding" in verdict(checks=[check(1e-9, "plain")]).failures[0]
    assert not verdict(outside=1).passed
    tie = Divergence(0, 3, 5, 6, 2e-5, True)
    assert verdict(divergences=[tie]).passed
    assert any("tie:" in s for s in verdict(divergences=[tie], greedy_prompts=1).sentences())
    assert not verdict(divergences=[replace(tie, tie=False)]).passed
    assert not verdict(logprobs={"plain": LogprobGap(10, 0.02, 0.002)}).passed
    assert not verdict(logprobs={"plain": LogprobGap(10, 1e-3, 0.0011)}).passed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--heads", "none", "--nodes", "1"], "--nodes 1"),
        (["--heads", "none", "--draws", "0"], "--draws 0"),
        (["--heads", "none", "--dtype", "int8"], "--dtype int8"),
        (["--heads", "none", "--correction-form", "grey"], "--correction-form grey"),
        (["--heads", "none", "--planted-bias", "2"], "--planted-bias 2 must lie between 0 and 1."),
        (["--heads", "none", "--planted-bias", "nan"], "--planted-bias nan"),
        (["--heads", "none"], "--heads none cannot be used: none cannot be read: No such file or directory."),
        (["--heads", "x" * 300], "cannot be used: File name too long."),
        (["--heads", "none", "--json", "x" * 300], "is longer than a file's name can be."),
        (["--heads", "none", "--json", "nowhere/verdict.json"], "--json nowhere"),
        (["--heads", "none", "--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(arguments, reason, tiny_dir):
    result = CliRunner().invoke(app, ["lossless", str(tiny_dir), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_heads_of_another_model_are_refused_under_the_name_of_the_option(tiny_dir, tmp_path):
    save_heads(FutureTokenHeads(HeadsSpec(1, 8, 4, 32)), tmp_path / "heads.safetensors")
    result = CliRunner().invoke(app, ["lossless", str(tiny_dir), "--heads", f"{tmp_path}/heads.safetensors"])
    assert result.exit_code == 2
    assert f"--heads {tmp_path}/heads.safetensors fits a hidden size and vocabulary of (8, 32)" in result.stderr


def test_nobody_trains_with_a_planted_bias():
    with pytest.raises(ValueError, match="planted_bias"):
        Config.model_validate({"rollout": {"engine": {"speculation": {"planted_bias": 0.02}}}})
