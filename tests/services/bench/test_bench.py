from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from services.bench.commands import bench_command, run_cells
from services.bench.heads import with_heads
from services.bench.measure import Bench
from services.bench.options import ABLATED, BASELINE, BenchOptions
from services.bench.result import (
    ArmResult,
    BenchResult,
    Bound,
    Curve,
    Interval,
    accepted_at,
    accepted_from,
    bounds_of,
    gain_of,
    ratio_of,
    ratio_of_sums,
)
from services.cli import app
from services.config_loader import load_config
from services.rollout.completion import EngineError, Round
from services.speculation_config import SpeculationConfig
from specroll_core.contracts import SamplingParams
from tests.e2e.cluster import write_tiny_run
from tests.services.rollout.test_engine import load
from tests.tiny_heads import make_tiny_heads

_TABLE = "rollout.engine.speculation.table=true"


def test_the_interval_of_a_ratio_is_the_bootstrap_of_turns() -> None:
    """Three turns: all 27 ways to draw them again are enumerated."""
    rates, plain = [20.0, 30.0, 44.0], [10.0, 20.0, 20.0]

    def median(values: list[float]) -> float:
        return sorted(values)[1]

    ratios = sorted(
        median([rates[i] for i in drawn]) / median([plain[i] for i in drawn]) for drawn in product(range(3), repeat=3)
    )
    interval = ratio_of(rates, plain)
    assert interval.value == pytest.approx(30 / 20)
    assert (interval.low, interval.high) == pytest.approx((ratios[0], ratios[-1]))


def test_what_disturbs_both_sides_of_a_turn_cancels() -> None:
    interval = ratio_of([20.0, 4.0, 36.0], [10.0, 2.0, 18.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))


def test_tokens_per_step_weigh_completions_by_their_steps() -> None:
    assert ratio_of_sums([(30.0, 10.0), (10.0, 10.0)]).value == pytest.approx(2.0)


def test_acceptance_by_depth() -> None:
    rounds = [Round(0, 4, 0, ()), Round(1, 4, 2, (0, 1)), Round(4, 4, 1, (3,)), Round(6, 4, 2, (0, 0))]
    assert accepted_at(rounds) == (3 / 4, 2 / 4)
    assert accepted_from(rounds) == {"heads": (2 / 4, 1 / 4), "memory": (0, 1 / 4), "sampled": (1 / 4, 0)}
    assert accepted_at([Round(0, 0, 0, ())]) == ()
    assert accepted_from([Round(0, 0, 0, ())]) == {}


def test_the_bound_is_the_best_width_with_everything_else_free() -> None:
    bound = Bound(1, 0.6, {0: (1.0, 0.030), 4: (2.0, 0.033), 8: (2.4, 0.045)})
    assert bound.value == pytest.approx(2.0 * 30 / 33)


def test_acceptance_is_pooled_over_concurrencies_of_one_temperature_and_time_is_not() -> None:
    alone = Curve(1, 0.6, {0: (100, 100, 0.030), 4: (90, 30, 0.033)})
    four = Curve(4, 0.6, {0: (400, 400, 0.040), 4: (310, 170, 0.050)})
    other = Curve(1, 1.0, {0: (100, 100, 0.030), 4: (150, 100, 0.033)})
    bounds = bounds_of([alone, four, other])
    assert [(b.concurrency, b.temperature) for b in bounds] == [(1, 0.6), (4, 0.6), (1, 1.0)]
    pooled = (90 + 310) / (30 + 170)
    assert bounds[0].curve == {0: (1.0, 0.030), 4: (pooled, 0.033)}
    assert bounds[1].value == pytest.approx(pooled * 40 / 50)
    assert bounds[2].value == pytest.approx(1.5 * 30 / 33)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ("plain", "guessing")}, "guessing is not known"),
        ({"arms": ("heads",)}, "must contain plain"),
        ({"concurrency": (0,)}, "--concurrency"),
        ({"temperatures": (-1.0,)}, "--temperature"),
        ({"rounds": 0}, "--rounds"),
        ({"nodes": 0}, "--nodes 0 must lie between 1 and 62"),
        ({"nodes": 63}, "--nodes 63 must lie between 1 and 62"),
        ({"widths": (3, 63)}, "--widths"),
        ({"widths": (0,)}, "--widths"),
        ({"threads": -1}, "--threads -1"),
        ({"temperatures": (0.6, math.nan)}, "--temperature"),
        ({"temperatures": (math.inf,)}, "--temperature"),
        ({"seconds": math.nan}, "--seconds nan"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"prompts": 0}, "--prompts"),
        ({"plot": Path("ratios.bmp")}, "--plot ratios.bmp must end in .png, .pdf or .svg"),
        ({"plot": Path("ratios")}, "--plot ratios must end in"),
        ({"ablate": True, "learner": True}, "--ablate"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(**options)


def test_the_largest_tree_of_the_options_is_one_that_an_engine_verifies() -> None:
    tree = BenchOptions(nodes=62, widths=(62,)).largest_tree
    assert SpeculationConfig(max_nodes=tree).max_nodes == 63


def refuse(command: list[str], reason: str, directory: Path) -> None:
    before = sorted(directory.rglob("*"))
    done = CliRunner().invoke(app, ["bench", *command])
    assert (done.exit_code, done.stdout) == (2, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompts", "9"], "--prompts 9 is more than the 8 that data.holdout keeps"),
        (["--set", "data.holdout=0"], "data.holdout is 0"),
        (["--temperature", "nan"], "--temperature"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--nodes", "-1"], "--nodes -1"),
        (["--arms", "plain,heads,heads-memory"], "no heads for heads, heads-memory"),
        ([], "no heads for heads-target-match, heads:"),
        (["--ablate"], "no heads for heads-target-match"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(tmp_path: Path, arguments: list[str], reason: str) -> None:
    refuse([str(write_tiny_run(tmp_path)), *arguments], reason, tmp_path)


def test_an_arm_without_heads_needs_none(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path)
    config = load_config(path)
    options = BenchOptions(arms=("plain", "lookup", "memory", "speculation"))
    assert with_heads(config, path, [], options).rollout.engine.speculation.heads is None


@pytest.mark.parametrize("setting", ["heads.init", "rollout.engine.speculation.heads"])
def test_heads_are_those_that_a_run_would_begin_with(tmp_path: Path, setting: str) -> None:
    path = write_tiny_run(tmp_path)
    overrides = [f"{setting}={tmp_path / 'some.safetensors'}"]
    found = with_heads(load_config(path, overrides), path, overrides, BenchOptions())
    assert found.rollout.engine.speculation.heads == tmp_path / "some.safetensors"


def test_heads_that_a_run_would_train_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_run(tmp_path, heads={"init": "auto"})
    config = load_config(path)
    asked = []
    monkeypatch.setattr("services.bench.heads.ensure_heads", lambda *given: asked.append(given) or tmp_path / "made")
    found = with_heads(config, path, [], BenchOptions())
    assert found.rollout.engine.speculation.heads == tmp_path / "made"
    assert asked == [(config, path, [])]
    # Nothing is trained for those that have no use for it.
    assert with_heads(config, path, [], BenchOptions(arms=("plain", "memory"))) is config
    assert len(asked) == 1


class Cells:
    """A bench that never samples: two cells end, the third does not."""

    cell_seconds = 0.2

    async def cell(self, concurrency: int, temperature: float):
        if concurrency == 3:
            await asyncio.sleep(60)
        one = Interval(1.0, 1.0, 1.0)
        arm = ArmResult("plain", concurrency, temperature, (5.0,), one, one, one, (), {}, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0)
        return [arm], Curve(concurrency, temperature, {0: (10, 10, 0.1), 1: (15, 10, 0.1)})


def test_what_was_measured_before_a_cell_that_does_not_end_is_kept(tmp_path: Path) -> None:
    options = BenchOptions(concurrency=(1, 2, 3), temperatures=(0.6,), json=tmp_path / "bench.json")
    result = BenchResult({})
    with asyncio.Runner() as runner, pytest.raises(EngineError, match="3 in flight did not end"):
        run_cells(runner, Cells(), options, result)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [arm["concurrency"] for arm in record["arms"]] == [1, 2]
    assert [bound["value"] for bound in record["bounds"]] == pytest.approx([1.5, 1.5])
    assert record["complete"] is False
    with asyncio.Runner() as runner:
        run_cells(runner, Cells(), replace(options, concurrency=(1, 2)), BenchResult({}))
    assert json.loads((tmp_path / "bench.json").read_text())["complete"] is True


def test_the_limit_of_a_cell_follows_what_was_asked_for() -> None:
    def limit(options: BenchOptions) -> float:
        return Bench(None, [], SamplingParams(), options, lambda *_: None).cell_seconds

    short = BenchOptions(rounds=2, seconds=1.0)
    long = BenchOptions(rounds=10, seconds=60.0)
    assert limit(short) == 3600
    # Five arms of a minute and seven widths of half of one, ten times, each after its warm-up.
    assert limit(long) > 10 * (5 * 61.5 + 7 * 31.5)


@pytest.mark.engine
def test_a_bench_measures_every_arm_on_a_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of time mean nothing here: what is counted must add up."""
    config = write_tiny_run(tmp_path, sampling={"max_new_tokens": 48}, model={"dtype": "float32"})
    options = BenchOptions(
        concurrency=(3,),
        temperatures=(0.2,),
        arms=("plain", "lookup", "memory"),
        widths=(3,),
        rounds=2,
        seconds=1.2,
        warmup=0.2,
        prompts=4,
        group_size=2,
        threads=1,
        json=tmp_path / "bench.json",
        plot=tmp_path / "bench.png",
    )
    assert bench_command(config, [], options) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    plain, lookup, memory = record["arms"]
    assert [arm["arm"] for arm in record["arms"]] == ["plain", "lookup", "memory"]
    assert record["complete"] is True
    assert all(len(arm["rates"]) == 2 and sum(arm["rates"]) > 0 for arm in record["arms"])
    assert plain["ratio"]["value"] == plain["tokens_per_step"]["value"] == 1
    assert plain["nodes"] == 0
    assert plain["accepted_at"] == []
    assert memory["tokens_per_step"]["value"] >= 1
    assert lookup["propose_seconds"] >= 0
    # Sampling is no part of plain decoding's forward, and prompts are no part of its steps.
    assert plain["accept_seconds"] > 0
    assert plain["prefill_seconds"] > 0
    assert plain["decode_ratio"]["value"] == 1
    (bound,) = record["bounds"]
    assert set(bound["curve"]) == {"0", "3"}
    assert bound["curve"]["0"][0] == 1
    assert bound["value"] >= 1
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "temperature 0.2" in capsys.readouterr().out


def test_the_gain_is_that_of_the_sums_and_its_interval_draws_prompts() -> None:
    sums, base = [(30.0, 10.0), (12.0, 8.0)], [(20.0, 10.0), (10.0, 10.0)]

    def gain(drawn: tuple[int, ...]) -> float:
        (a, b), (c, d) = ([sum(rows[i][j] for i in drawn) for j in (0, 1)] for rows in (sums, base))
        return (a / b) / (c / d) - 1

    interval = gain_of(sums, base)
    assert interval.value == pytest.approx(gain((0, 1)))
    every = [gain(drawn) for drawn in product(range(2), repeat=2)]
    assert (interval.low, interval.high) == pytest.approx((min(every), max(every)))


@pytest.mark.engine
def test_an_ablation_completes_every_prompt_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_tiny_run(tmp_path, sampling={"max_new_tokens": 24}, model={"dtype": "float32"})
    options = BenchOptions(
        concurrency=(4,),
        temperatures=(0.3,),
        nodes=3,
        prompts=2,
        group_size=2,
        threads=1,
        ablate=True,
        json=tmp_path / "ablation.json",
    )
    with pytest.raises(ValueError, match="speculation.heads"):
        bench_command(config, [], options)
    with pytest.raises(ValueError, match="name one arm at most that reads it"):
        bench_command(config, ["rollout.engine.speculation.heads=none.safetensors", _TABLE], options)
    with pytest.raises(ValueError, match="repeats its prompts"):
        bench_command(config, [_TABLE], BenchOptions())
    model = load(tmp_path / "model")
    heads = make_tiny_heads(model, [[5, 6, 7], [30, 31]], tmp_path / "heads.safetensors")
    assert bench_command(config, [f"rollout.engine.speculation.heads={heads}"], options) == 0
    found = {a["arm"]: a for a in json.loads((tmp_path / "ablation.json").read_text())["ablation"]}
    assert set(found) == set(ABLATED)
    assert found[BASELINE]["gain"] is None
    for arm, a in found.items():
        assert a["nodes"] == 3
        assert 1 <= a["tokens_per_step"]["value"] <= 4
        if arm != BASELINE:
            ratio = a["tokens_per_step"]["value"] / found[BASELINE]["tokens_per_step"]["value"]
            assert a["gain"]["value"] == pytest.approx(ratio - 1)
    assert "gain over heads-lookup" in capsys.readouterr().out
    # Those named alone, against the first; and the table, over two cells that share no prompt.
    moved = shutil.copytree(tmp_path / "model", tmp_path / "moved")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    model.save_pretrained(moved)
    named = replace(
        options, arms=("heads-own-memory", "heads-memory"), temperatures=(0.3, 0.6), prompts=4, policy=moved
    )
    assert bench_command(config, [f"rollout.engine.speculation.heads={heads}", _TABLE], named) == 0
    rows = json.loads((tmp_path / "ablation.json").read_text())["ablation"]
    assert [(a["arm"], a["temperature"]) for a in rows] == [
        (arm, temperature) for temperature in (0.3, 0.6) for arm in ("heads-own-memory", "heads-memory")
    ]
    assert [a["gain"] is None for a in rows] == [True, False] * 2
    assert "gain over heads-own-memory" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no config.json in it"):
        bench_command(config, [f"rollout.engine.speculation.heads={heads}"], replace(options, policy=tmp_path / "none"))


def test_a_report_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path)
    with pytest.raises(ValueError, match="--json .* must name a file in a directory that exists"):
        bench_command(config, [], BenchOptions(json=tmp_path / "none" / "bench.json"))
