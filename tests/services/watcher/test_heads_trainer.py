"""The trainer's process on the tiny model: a result, an interruption that costs nothing, and what goes wrong."""

from __future__ import annotations

import shutil
import signal
import time

import psutil
import pytest
import torch

from services.common.lifecycle import wait_until
from services.common.row_frames import RowFrame, prompt_name
from services.heads.fingerprint import ModelFingerprint
from services.rollout.heads_file import read_heads
from services.watcher.gate import decide
from services.watcher.job import TrainJob
from services.watcher.rows import RowBuffer
from services.watcher.train_process import anchor, passes, vocabulary
from services.watcher.trainer import Trainer, TrainingFailed
from specroll_core.heads import FutureTokenHeads, HeadsSpec

PROMPTS, LENGTH = 40, 48


@pytest.fixture(scope="module")
def buffer(tiny_dir):
    """Sampled continuations of short prompts, with the states that their tokens were drawn from."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    buffer = RowBuffer(10_000, 10_000, holdout=0.3)
    prompts = torch.randint(3, 300, (PROMPTS, 4))
    with torch.no_grad():
        made = model.generate(
            prompts, max_new_tokens=LENGTH, do_sample=True, top_k=0, temperature=0.5, eos_token_id=None, pad_token_id=0
        )
        hidden = model(made, output_hidden_states=True).hidden_states[-1]
    for prompt, tokens, states in zip(prompts.tolist(), made, hidden, strict=True):
        rows = (tokens[4:].to(torch.int32), states[3:-1].to(torch.bfloat16))
        buffer.add(RowFrame(prompt_name(prompt), 0, 0.5, 1.0, -1, 0.0, *rows))
    return buffer


def job(tiny_dir, **changes):
    fields = {
        "policy_dir": str(tiny_dir), "heads_dir": "", "serving": 0, "heads": 2, "rank": 32, "epochs": 2,
        "seconds": 100.0, "nodes": 4, "sampled_children": True, "seed": 0,
    }  # fmt: skip
    return TrainJob(**(fields | changes))


def start(trainer, job, buffer):
    trainer.start(job, buffer.training(10_000), buffer.held_out(10_000))


def result_of(trainer, seconds=90):
    found = []
    wait_until(lambda: found.append(trainer.poll()) or found[-1] is not None, seconds, "the trainer")
    return found[-1]


def test_a_training_and_its_interrupted_twin_agree(tiny_dir, buffer, tmp_path):
    trainer = Trainer(tmp_path / "a", threads=1, nice=5)
    start(trainer, job(tiny_dir, epochs=8), buffer)
    assert psutil.Process(trainer._process.pid).nice() == 5
    files, result = result_of(trainer)
    assert result["model"] == {k: getattr(ModelFingerprint.of(tiny_dir), k) for k in result["model"]}
    assert result["gate"] == decide(result["gate"]["prompts"], nodes=4, temperature=0.5).to_json() | {
        "prompts": result["gate"]["prompts"]
    }
    assert result["gate"]["old"] == pytest.approx(1.0)
    assert result["gate"]["new"] > 1.0
    whole = read_heads(files.heads_file)
    assert whole.vocabulary is not None
    assert result["loss_last"] < result["loss_first"]

    twin = Trainer(tmp_path / "b", threads=1, nice=5)
    start(twin, job(tiny_dir, epochs=8), buffer)
    process = psutil.Process(twin._process.pid)
    # As soon as it handles the signal: however far it is, what it has done must not be lost or done differently.
    wait_until(lambda: "caught" in handled(process), 60, "the trainer to be ready for signals")
    twin.stop()
    assert not process.is_running()
    assert twin.resume()
    files, again = result_of(twin)
    for a, b in zip(whole.parameters(), read_heads(files.heads_file).parameters(), strict=True):
        assert torch.equal(a, b)
    assert again["gate"]["prompts"] == result["gate"]["prompts"]
    twin.discard(files)
    assert not twin.resume()


def test_a_training_goes_on_from_heads_that_were_kept(tiny_dir, buffer, tmp_path):
    trainer = Trainer(tmp_path, threads=1, nice=5)
    first = []
    for go_on in (True, False, True):  # there are none yet; they are not asked for; they are
        trainer.start(job(tiny_dir), buffer.training(10_000), buffer.held_out(10_000), go_on=go_on)
        files, result = result_of(trainer)
        first.append(result["loss_first"])
        if len(first) == 1:
            trainer.keep(files)
        trainer.discard(files)
    assert first[0] == first[1]
    assert first[2] < 0.9 * first[0]
    trainer.keep_none()
    trainer.keep_none()
    assert list(tmp_path.iterdir()) == []


def handled(process):
    """Whether the process catches SIGTERM: bit 14 of SigCgt in /proc."""
    with open(f"/proc/{process.pid}/status") as file:
        mask = int(next(line for line in file if line.startswith("SigCgt")).split()[1], 16)
    return ["caught"] if mask >> (signal.SIGTERM - 1) & 1 else []


def test_training_ends_when_its_time_is_up(tiny_dir, buffer, tmp_path):
    trainer = Trainer(tmp_path, threads=1, nice=5)
    began = time.monotonic()
    start(trainer, job(tiny_dir, epochs=100_000, seconds=1.0), buffer)
    _, result = result_of(trainer)
    assert 0 < result["steps"] < 100_000
    assert time.monotonic() - began < 90


def test_a_failure_says_why_and_leaves_nothing(tiny_dir, buffer, tmp_path):
    trainer = Trainer(tmp_path, threads=1, nice=5)
    start(trainer, job(tiny_dir, policy_dir=str(tmp_path / "missing")), buffer)
    with pytest.raises(TrainingFailed, match="exit code 1: .*missing"):
        result_of(trainer)
    assert not trainer.running
    assert not trainer.resume()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [500, 4000, 56_000])
def test_more_rows_outvote_the_heads_that_training_began_with(rows):
    """The least of mean (x_i - theta)^2 / 2 + a (theta - theta_0)^2 is what a prior of fixed precision gives."""
    theta_0, mean, precision = 1.0, 3.0, 2 * 12.0
    pulled = 2 * anchor(rows)
    assert (mean + pulled * theta_0) / (1 + pulled) == pytest.approx(
        (rows * mean + precision * theta_0) / (rows + precision)
    )


def test_a_policy_that_the_learner_deletes_is_still_there_for_its_training(tiny_dir, buffer, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(tiny_dir, policy)
    trainer = Trainer(tmp_path / "jobs", threads=1, nice=5)
    start(trainer, job(policy, seconds=1.0), buffer)
    shutil.rmtree(policy)
    files, result = result_of(trainer)
    assert result["steps"] > 0
    trainer.discard(files)
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.parametrize(
    ("rows", "epochs", "taken"), [(1000, 3, 16), (4000, 3, 8), (5000, 3, 7), (50_000, 3, 3), (4000, 9, 9)]
)
def test_few_rows_are_passed_over_more_often(rows, epochs, taken):
    assert passes(rows, epochs) == taken


def test_tokens_that_few_rows_do_not_hold_stay_in_the_vocabulary():
    heads = FutureTokenHeads(HeadsSpec(1, 8, 2, 100))
    assert vocabulary(torch.tensor([7, 3]), None).tolist() == [7, 3]
    assert vocabulary(torch.tensor([7, 3]), heads).tolist() == [7, 3]
    heads.vocabulary = torch.tensor([3, 90, 7, 1])
    assert vocabulary(torch.tensor([7, 3]), heads).tolist() == [7, 3, 90, 1]
