"""`specroll heads`: what its sub-commands do."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from services.common.artifacts import MANIFEST
from services.config import Config, HeadsConfig
from services.config_loader import load_config
from services.heads.artifact import HeadsManifest, TrainedOn, check_target, load_artifact, write_heads
from services.heads.auto import AUTO, cached_heads, trained_already
from services.heads.collect import read_texts, text_rows
from services.heads.fingerprint import ModelFingerprint
from services.heads.lineage import is_registry, show_registry
from services.heads.report import (
    NODES,
    RULES,
    Acceptance,
    acceptance_table,
    acceptances,
    as_json,
    description,
    from_json,
)
from services.heads.rollouts import chain, first_rows, hold_out, sample_rollouts, temperatures, to_learn_from
from services.heads.target import TargetModel
from services.heads.train import TrainedHeads, train
from services.learner.prompts import load_prompts
from services.machine import cores, keep_freed_memory, quiet_libraries
from services.models import fetch_model
from services.progress import progress_bar
from specroll_core.head_training import HeadRows, HeadTrainConfig
from specroll_core.heads import FutureTokenHeads

# Held-out tokens per temperature: enough for an interval of about two percent.
_EVAL_TOKENS = 3000
# Held-out tokens that the loss is reported on, over the whole vocabulary.
_KL_TOKENS = 2000
_USUAL = HeadsConfig()

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """tokens: to collect. texts: a file with a column `text` instead of rollouts. heads, rank: the heads' shape,
    None for the usual one. epochs: passes over the rows. threads: 0 for all cores."""

    tokens: int = 60_000
    texts: Path | None = None
    heads: int | None = None
    rank: int | None = None
    epochs: int = 8
    threads: int = 0


def train_command(config_path: Path, overrides: Sequence[str], out: Path, options: TrainOptions) -> int:
    """Collects rows, trains heads, measures them on held-out prompts and writes them to `out`; "auto" names the
    directory in the cache in which a run looks for its own, where nothing is done twice.

    Raises ValueError for what a user can put right; `out` appears last and whole.
    """
    config = load_config(config_path, overrides)
    if str(out) == AUTO:
        _check_options(options)
        _check_auto(options)
        out = cached_heads(config)
        if trained_already(out, config):
            console.print(f"{out} is there already")
            return 0
        console.print("training heads for the model's own texts, once")
        shape = config.heads.heads, config.heads.rank
    else:
        shape = options.heads or _USUAL.heads, options.rank or _USUAL.rank
    check_target(out)
    _check_options(options)
    target = _load(config, options.threads)
    started = time.monotonic()
    rollouts, source = _rows(config, target, options)
    seconds = time.monotonic() - started
    settings = HeadTrainConfig(epochs=options.epochs, seed=config.run.seed)
    training, held_out = hold_out(rollouts, settings.holdout, settings.seed)
    kept, held = chain(training), chain(held_out)
    prompts = len(kept.prompt.unique()) + len(held.prompt.unique())
    console.print(f"collected {len(kept) + len(held):,} tokens of {prompts:,} prompts in {seconds:.0f} s")
    if len(held) == 0:
        raise ValueError(f"--tokens {options.tokens} gives a single prompt; none could be held out, so ask for more.")

    started = time.monotonic()
    with progress_bar("training", None) as step:
        made = train(
            kept,
            first_rows(held, _KL_TOKENS),
            target.lm_head,
            target.embedding,
            heads=shape[0],
            rank=shape[1],
            config=settings,
            progress=lambda done, steps, _loss: step(done, steps),
        )
    _say_losses(made, time.monotonic() - started)
    if options.texts is not None:
        held_out = _fresh_rollouts(config, target, min(options.tokens, _EVAL_TOKENS), options.threads)
    measured = _measure(made.heads, held_out, config, target)
    trained_on = TrainedOn(
        rows=len(kept),
        prompts=len(kept.prompt.unique()),
        source=source,
        temperature=None if options.texts else config.sampling.temperature,
    )
    gate = {
        "held_out_rows": len(held),
        "kl_before": list(made.report.heldout_before),
        "kl_after": list(made.report.heldout_after),
        "temperatures": [] if options.texts else list(rollouts),
        "acceptance": as_json(measured),
    }
    write_heads(out, made.heads, HeadsManifest(target.fingerprint, trained_on, None, gate))
    console.print(f"wrote {out}; serve it with --set rollout.engine.speculation.heads={out}")
    return 0


def eval_command(heads_dir: Path, config_path: Path, overrides: Sequence[str], tokens: int, threads: int) -> int:
    """Measures heads on fresh rollouts of the configuration's held-out prompts."""
    config = load_config(config_path, overrides)
    if tokens < 1:
        raise ValueError(f"--tokens {tokens} must be at least 1.")
    model = ModelFingerprint.of(fetch_model(config.model.source))
    # Training moves the LM head: how far heads of an earlier policy have fallen behind is worth measuring.
    loaded = load_artifact(heads_dir, model, lm_head_may_differ=True)
    if loaded.manifest.model.lm_head_sha256 != model.lm_head_sha256:
        console.print("These heads were trained with another LM head than the model's, which has been trained since.")
    target = _load(config, threads)
    heads = loaded.heads.to(target.device)
    _measure(heads, _fresh_rollouts(config, target, tokens, threads), config, target)
    return 0


def show_command(heads_dir: Path) -> int:
    """Prints the manifest of an artifact whose files are as it says, or the versions in the directory of a run."""
    if is_registry(heads_dir):
        return show_registry(heads_dir)
    loaded = load_artifact(heads_dir)
    try:
        measured = from_json(loaded.manifest.gate.get("acceptance") or [])
    except ValueError as error:
        raise ValueError(f"gate.acceptance in {loaded.artifact.path / MANIFEST} cannot be shown: {error}.") from error
    console.print(description(loaded))
    if measured:
        console.print(acceptance_table(measured))
    return 0


def _check_options(options: TrainOptions) -> None:
    for name in ("tokens", "rank", "epochs"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least 1.")
    if options.heads is not None and not 1 <= options.heads <= 8:
        raise ValueError(f"--heads {options.heads} must lie between 1 and 8.")
    if options.texts is not None and not options.texts.is_file():
        raise ValueError(f"--texts {options.texts} is not an existing file.")


def _check_auto(options: TrainOptions) -> None:
    """What lies in the cache is what its name says: of the configuration's shape, and of the model's own texts."""
    if options.texts is not None:
        raise ValueError("--out auto is for heads of the model's own rollouts: leave --texts out, or name a directory.")
    for name in ("heads", "rank"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(
                f"--out auto takes the shape from the configuration: write --set heads.{name}={value} in place of "
                f"--{name} {value}."
            )


def _load(config: Config, threads: int) -> TargetModel:
    if threads < 0:
        raise ValueError(f"--threads {threads} must be 0 or more.")
    quiet_libraries()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(threads or len(cores()))
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TargetModel(fetch_model(config.model.source), getattr(torch, config.model.dtype), device)


def _rows(config: Config, target: TargetModel, options: TrainOptions) -> tuple[dict[float, HeadRows], str]:
    """What to train on, by temperature, and what it is called in the manifest. Given texts are as they are: 1."""
    if options.texts is not None:
        longest = config.rollout.engine.context_length
        texts = read_texts(options.texts, target, longest=longest, tokens=options.tokens, seed=config.run.seed)
        with progress_bar("reading", options.tokens) as step:
            return {1.0: text_rows(target, texts, progress=step)}, options.texts.name
    prompts = load_prompts(config.data, target.tokenizer, config.run.seed)
    ids = to_learn_from([prompts.train[i].ids for i in prompts.order(0)], config.watcher.holdout)
    return _sample(config, target, ids, options.tokens, options.threads), config.data.source


def _fresh_rollouts(config: Config, target: TargetModel, tokens: int, threads: int) -> dict[float, HeadRows]:
    """Rollouts of about `tokens` tokens per temperature of the prompts that the configuration holds out, or, where it
    holds out none, of those that training takes last."""
    prompts = load_prompts(config.data, target.tokenizer, config.run.seed)
    ids = [prompt.ids for prompt in prompts.holdout or [prompts.train[i] for i in reversed(prompts.order(0))]]
    return _sample(config, target, ids, tokens * len(temperatures(config)), threads)


def _sample(
    config: Config, target: TargetModel, prompts: Sequence[Sequence[int]], tokens: int, threads: int
) -> dict[float, HeadRows]:
    with progress_bar("sampling", tokens) as step:
        return sample_rollouts(
            config, target, prompts, tokens=tokens, threads=threads, seed=config.run.seed, progress=step
        )


def _measure(
    heads: FutureTokenHeads, rollouts: dict[float, HeadRows], config: Config, target: TargetModel
) -> list[Acceptance]:
    filters = {name: getattr(config.sampling, name) for name in ("top_k", "top_p", "min_p")}
    some = {temperature: first_rows(rows, _EVAL_TOKENS) for temperature, rows in rollouts.items() if len(rows)}
    total, measured = len(some) * len(RULES) * len(NODES), []
    with progress_bar("measuring", total) as step:
        for one in acceptances(heads, some, target.lm_head, target.embedding, law=filters):
            measured.append(one)
            step(len(measured))
    console.print(acceptance_table(measured))
    return measured


def _say_losses(made: TrainedHeads, seconds: float) -> None:
    def words(losses: tuple[float, ...]) -> str:
        return " / ".join(f"{loss:.3f}" for loss in losses)

    report = made.report
    console.print(
        f"trained on {report.train_rows:,} tokens in {seconds:.0f} s, ranking {made.kept:,} tokens that carry "
        f"{made.coverage:.2%} of the mass"
    )
    console.print(
        f"KL on {report.heldout_rows:,} held-out tokens, head by head: {words(report.heldout_before)} nats before, "
        f"{words(report.heldout_after)} after"
    )
