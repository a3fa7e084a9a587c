"""Fits the count table that `CountTableScorer.with_prior` starts from, and writes `specroll_core/scorer_prior.py`.

Rollouts of training prompts that the heads were not trained on are sampled in groups and replayed with heads and
trajectory memory at several budgets and both common temperatures, while one table counts.

    python bench/fit_scorer_prior.py --config examples/word_problems.toml --heads HEADS_DIR
"""

from __future__ import annotations

import argparse
import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from services.config_loader import load_config
from services.heads.artifact import load_artifact
from services.heads.collect import sample_rows
from services.heads.target import TargetModel
from services.learner.prompts import load_prompts
from services.models import fetch_model
from specroll_core.head_training import HeadRows
from specroll_core.reflex import Reflex
from specroll_core.replay import replay
from specroll_core.replay_guesses import HeadGuesses, head_guesses
from specroll_core.scorer import PRIOR_TRIALS_KEPT, CountTableScorer

TEMPERATURES = (0.6, 1.0)
BUDGETS = (4, 8, 16)
OUT = Path(__file__).parents[1] / "specroll_core" / "scorer_prior.py"

HEADER = '''"""The count table that a scorer starts from. Written by `bench/fit_scorer_prior.py`; not for editing.

Two bytes per cell of the candidates' table, then of the tails': the hit rate in 255ths, and the trials it is worth.
"""

# fmt: off
TABLE = (
'''


def fit(rollouts: Iterable[tuple[HeadRows, HeadGuesses, Mapping[int, Sequence[int]]]]) -> CountTableScorer:
    """The sum of one table for each set of rollouts, replayed at every budget with memory and without."""
    total = CountTableScorer()
    for rows, guesses, prompts in rollouts:
        scorer = CountTableScorer()
        for nodes in BUDGETS:
            replay(guesses, rows, nodes=nodes + 1, scorer=scorer)
            report = replay(guesses, rows, nodes=nodes + 1, scorer=scorer, reflex=Reflex(), prompts=prompts)
            print(f"T = {guesses.temperature:g}, {nodes} nodes: {report.tokens_per_step:.3f} tokens/step", flush=True)
        total.counts += scorer.counts
        total.tail_counts += scorer.tail_counts
    return total


def write(scorer: CountTableScorer, path: Path = OUT) -> None:
    data = bytearray()
    for hits, trials in (scorer.counts, scorer.tail_counts):
        rate = torch.where(trials > 0, hits / trials.clamp_min(1e-9), 0.0).clamp(0, 1)
        data += bytes((rate * 255).round().to(torch.uint8).tolist())
        data += bytes(trials.clamp_max(PRIOR_TRIALS_KEPT).round().to(torch.uint8).tolist())
    text = base64.b85encode(zlib.compress(bytes(data), 9)).decode()
    lines = [f"    {text[i : i + 100]!r}\n" for i in range(0, len(text), 100)]
    path.write_text(HEADER + "".join(lines) + ")\n# fmt: on\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/word_problems.toml"))
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    options = parser.parse_args()
    config = load_config(options.config, [])
    target = TargetModel(fetch_model(config.model.source), getattr(torch, config.model.dtype), torch.device("cpu"))
    heads = load_artifact(options.heads).heads
    prompts = load_prompts(config.data, target.tokenizer, config.run.seed)
    # Heads train on the first prompts of this order.
    chosen = [prompts.train[i].ids for i in reversed(prompts.order(0))][: options.prompts]

    def rollouts() -> Iterable[tuple[HeadRows, HeadGuesses, Mapping[int, Sequence[int]]]]:
        for temperature in TEMPERATURES:
            law = replace(config.sampling.to_params(), temperature=temperature)
            rows = sample_rows(target, [ids for ids in chosen for _ in range(options.group)], law)
            rows = replace(rows, prompt=rows.prompt // options.group)
            yield (
                rows,
                head_guesses(heads, rows, target.lm_head, target.embedding, temperature=temperature),
                dict(enumerate(chosen)),
            )

    write(fit(rollouts()))


if __name__ == "__main__":
    main()
