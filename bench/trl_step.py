"""Wall-clock seconds for one GRPO step: SpecRoll and TRL 1.16 on the same task, model, batch and cores.

    python -m venv ~/.cache/specroll/trl
    ~/.cache/specroll/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python bench/trl_step.py --steps 10 --rounds 2

Each round runs one side after the other, each in a process of its own, so that both meet the machine in the same
state. A step is the time between the ends of two steps: sampling, grading, the update, and handing the new weights
to the sampler. Start-up, evaluation and the first `--warmup` steps of each run are left out. Both sides sample
8 prompts x 8 completions of at most 24 tokens from the same prompts with the same law, grade by the last number,
take one optimiser step for each batch, and keep float32 master weights. The completions get shorter while the
model learns, so both sides run the same number of steps from the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TRL = Path("~/.cache/specroll/trl/bin/python").expanduser()
RUN_TIMEOUT_SECONDS = 3600


def main() -> int:
    options = parse_options()
    if options.trl_side:
        return run_trl_side(json.loads(options.trl_side.read_text()))
    options.out.mkdir(parents=True, exist_ok=True)
    job = prepare(options)
    sides = {"trl": run_trl, "specroll": run_specroll}
    chosen = [options.only] if options.only else list(sides)
    seconds: dict[str, list[float]] = {side: [] for side in chosen}
    for number in range(options.rounds):
        # The order alternates, so that a machine that warms up or slows down favours neither side.
        for side in chosen if number % 2 == 0 else reversed(chosen):
            found = sides[side](options, job, options.out / f"{side}-{number}")[options.warmup :]
            print(f"round {number + 1}, {side}: " + " ".join(f"{s:.1f}" for s in found), flush=True)
            seconds[side] += found
    report = summarise(seconds)
    (options.out / "trl_step.json").write_text(json.dumps({"job": job, "seconds": seconds, **report}, indent=1))
    for side in chosen:
        mean, low, high = report[side]
        median = statistics.median(seconds[side])
        print(f"{side:9} {mean:6.2f} s/step [{low:.2f}, {high:.2f}], median {median:.2f}, {len(seconds[side])} steps")
    if "ratio" in report:
        ratio, low, high = report["ratio"]
        print(f"TRL takes {ratio:.2f} [{low:.2f}, {high:.2f}] times as long for a step as SpecRoll")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "quickstart.toml")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run, warm-up included")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of each run that are left out")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of TRL's process")
    parser.add_argument("--dtype", choices=["autocast", "float32"], default="autocast", help="how TRL computes")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="settings of SpecRoll's side")
    parser.add_argument("--only", choices=["trl", "specroll"])
    parser.add_argument("--trl-python", type=Path, default=DEFAULT_TRL)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out" / "trl_step")
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0 <= options.warmup < options.steps - 1:
        parser.error("--warmup must leave at least two of --steps")
    return options


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """What both sides must share, with the prompts rendered once."""
    from transformers import AutoTokenizer

    from services.config_loader import load_config
    from services.learner.prompts import load_prompts
    from services.models import fetch_model

    config = load_config(options.config, options.set)
    model = fetch_model(config.model.source)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = load_prompts(config.data, tokenizer, config.run.seed)
    learner, sampling = config.learner, config.sampling
    needed = options.steps * learner.batch_groups
    order = [i for epoch in range(1 + needed // len(prompts.train)) for i in prompts.order(epoch)][:needed]
    return {
        "model": str(model),
        "prompts": [
            {"prompt": tokenizer.decode(prompts.train[i].ids), "answer": prompts.train[i].answer} for i in order
        ],
        "steps": options.steps,
        "batch_groups": learner.batch_groups,
        "group_size": learner.group_size,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "learning_rate": learner.learning_rate,
        "warmup_steps": learner.warmup_steps,
        "betas": list(learner.betas),
        "max_grad_norm": learner.max_grad_norm,
        "clip": [learner.loss.clip_low, learner.loss.clip_high],
        "threads": options.threads,
        "dtype": options.dtype,
        "seed": config.run.seed,
    }


def run_trl(options: argparse.Namespace, job: dict[str, Any], directory: Path) -> list[float]:
    """Seconds of each step but the first, which has no step before it to count from."""
    directory.mkdir(parents=True, exist_ok=True)
    description = directory / "job.json"
    description.write_text(json.dumps({**job, "out": str(directory)}))
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(options.trl_python), __file__, "--trl-side", str(description)]
    with (directory / "log").open("w") as log:
        subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=RUN_TIMEOUT_SECONDS
        )
    lines = map(json.loads, (directory / "steps.jsonl").read_text().splitlines())
    return differences([line["time"] for line in lines if line["kind"] == "end"])


def run_trl_side(job: dict[str, Any]) -> int:
    """Runs in TRL's environment: writes steps.jsonl with the time at the end of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from services.rollout.verifiers import exact

    torch.set_num_threads(job["threads"])
    out = Path(job["out"])
    lines = (out / "steps.jsonl").open("w")

    class Clock(TrainerCallback):
        """Writes when each step ended, and what TRL reports of it: a step that learns nothing is not a measurement."""

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_rest: Any) -> None:
            print(json.dumps({"kind": "end", "step": state.global_step, "time": time.time()}), file=lines, flush=True)

        def on_log(self, _arguments: Any, state: Any, _control: Any, logs: dict[str, Any], **_rest: Any) -> None:
            if "reward" in logs:
                print(json.dumps({"kind": "log", "step": state.global_step, **logs}), file=lines, flush=True)

    def reward(completions: list[str], answer: list[str], **_columns: Any) -> list[float]:
        return [exact(text, right) for text, right in zip(completions, answer, strict=True)]

    batch = job["batch_groups"] * job["group_size"]
    arguments = GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=job["dtype"] == "autocast",
        per_device_train_batch_size=batch,
        gradient_checkpointing=False,  # the batch fits: recomputation would only cost time
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        max_grad_norm=job["max_grad_norm"],
        epsilon=job["clip"][0],
        epsilon_high=job["clip"][1],
        beta=0.0,
        loss_type="grpo",
        max_steps=job["steps"],
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        seed=job["seed"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(job["prompts"]),
        callbacks=[Clock()],
    )
    trainer.train()
    return 0


def run_specroll(options: argparse.Namespace, job: dict[str, Any], directory: Path) -> list[float]:
    """Seconds between the ends of consecutive steps, as the learner's metrics give them."""
    settings = [
        f'run.dir="{directory}"',
        'reward.verifier="exact"',
        f"learner.steps={job['steps']}",
        f"learner.checkpoint_every={job['steps']}",
        "eval.prompts=0",
        *options.set,
    ]
    command = [sys.executable, "-m", "services.cli", "train", str(options.config)]
    command += [word for setting in settings for word in ("--set", setting)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=RUN_TIMEOUT_SECONDS)
    lines = map(json.loads, (directory / "metrics" / "learner.jsonl").read_text().splitlines())
    return differences([line["time"] for line in lines if line["kind"] == "train"])


def differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def summarise(seconds: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Mean of each side and the ratio of the means, with 95 % intervals from 10,000 bootstrap samples.

    Means, because the steps of an asynchronous run alternate between short ones, whose groups were waiting, and long
    ones that wait: a median says little about how many steps an hour has.
    """
    draw = random.Random(0)
    resampled = {
        side: [statistics.fmean(draw.choices(values, k=len(values))) for _ in range(10_000)]
        for side, values in seconds.items()
    }
    report = {side: with_interval(statistics.fmean(values), resampled[side]) for side, values in seconds.items()}
    if len(seconds) == 2:
        ratios = [a / b for a, b in zip(resampled["trl"], resampled["specroll"], strict=True)]
        report["ratio"] = with_interval(report["trl"][0] / report["specroll"][0], ratios)
    return report


def with_interval(estimate: float, samples: list[float]) -> tuple[float, float, float]:
    ordered = sorted(samples)
    return estimate, ordered[len(ordered) // 40], ordered[-len(ordered) // 40]


if __name__ == "__main__":
    sys.exit(main())
