"""`specroll train` from the outside, on a tiny model: what a user types, sees and finds afterwards."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import end, metrics, processes_of, specroll, steps_done, wait_for, write_tiny_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

REPORT_KEYS = {
    "run_id", "completed", "steps", "resumed_at_step", "evaluations", "reward_before", "reward_after",
    "train_reward_first", "train_reward_last", "seconds", "overlap", "speculation", "tokens_per_second", "staleness",
    "mismatch_kl_equal_version", "groups", "checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("staleness", [1, 0])
def test_a_run_ends_with_a_report_and_a_checkpoint_that_transformers_loads(tmp_path: Path, staleness: int) -> None:
    config = write_tiny_run(tmp_path, learner={"max_staleness": staleness})
    process = specroll("train", str(config))
    try:
        out, err = process.communicate(timeout=300)
    finally:
        end(process)
    assert process.returncode == 0, out + err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert set(report) == REPORT_KEYS
    assert report["completed"]
    assert report["steps"] == 4
    assert report["groups"]["trained"] == 8
    assert report["groups"]["malformed"] == report["groups"]["stale"] == 0
    assert report["staleness"]["max"] <= staleness
    assert report["mismatch_kl_equal_version"] < 1e-5
    assert {e["step"] for e in report["evaluations"]} == {0, 4}
    assert "4/4" in out
    assert report["checkpoint"] in out

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(report["checkpoint"])
    AutoTokenizer.from_pretrained(report["checkpoint"])
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    moved = (model.model.embed_tokens.weight - before.model.embed_tokens.weight).abs().max()
    assert moved > 0, "the policy did not move"
    assert processes_of(tmp_path) == []


def test_ctrl_c_saves_and_resume_goes_on_with_the_next_step(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, learner={"steps": 60, "checkpoint_every": 50})
    run_dir = tmp_path / "run"
    process = specroll("train", str(config))
    try:
        wait_for(lambda: steps_done(run_dir) >= 2 or process.poll() is not None, "two steps")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        end(process)
    assert process.returncode == 130, out + err
    assert processes_of(tmp_path) == []
    done = steps_done(run_dir)
    assert 2 <= done < 60

    again = specroll("train", str(config), "--resume", "--set", f"learner.steps={done + 3}")
    try:
        out, err = again.communicate(timeout=200)
    finally:
        end(again)
    # Fewer steps than the interrupted run asked for would not be the same run.
    assert again.returncode == 2
    assert "learner.steps" in err

    again = specroll("train", str(config), "--resume", "--set", "eval.prompts=0")
    try:
        wait_for(lambda: steps_done(run_dir) >= done + 3 or again.poll() is not None, "three more steps")
        again.send_signal(signal.SIGINT)
        out, err = again.communicate(timeout=30)
    finally:
        end(again)
    assert again.returncode == 130, out + err
    steps = [line["step"] for line in metrics(run_dir) if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing or was done twice"
    assert all(line["off_policy/staleness/max"] <= 1 for line in metrics(run_dir) if line["kind"] == "train")
    groups = [g for line in metrics(run_dir) if line["kind"] == "train" for g in line["group_ids"]]
    assert len(groups) == len(set(groups)), "a prompt was trained twice"


def test_the_death_of_a_service_is_reported(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, learner={"steps": 1000})
    process = specroll("train", str(config))
    try:
        wait_for(lambda: steps_done(tmp_path / "run") >= 1 or process.poll() is not None, "a step")
        rollout = next(
            p for p in processes_of(tmp_path) if b"rollout" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")
        )
        import os

        os.kill(rollout, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 1
    assert "rollout service was killed by signal 9" in err
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("learner.lerning_rate=1", ["learner.lerning_rate", "learner.learning_rate"]),
        ("learner.steps=0", ["learner.steps", "at least 1"]),
        ("data.prompt_column=text", ["text", "question", "answer"]),
        ("model.source=no/such/dir", ["no/such/dir"]),
        ("redis.url=redis://127.0.0.1:1/0", ["127.0.0.1:1"]),
        ("learner.publish_every=5", ["publish_every", "max_staleness"]),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_and_nothing_is_left(tmp_path: Path, change: str, words: list[str]) -> None:
    config = write_tiny_run(tmp_path, redis={"connect_timeout_seconds": 1.0})
    process = specroll("train", str(config), "--set", change)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


def test_a_run_directory_of_another_run_and_a_busy_port_are_refused(tmp_path: Path) -> None:
    import socket

    config = write_tiny_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        process = specroll("train", str(config), "--set", f"learner.port={port}")
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2
        assert str(port) in err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    process = specroll("train", str(config))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "run.dir" in err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]
