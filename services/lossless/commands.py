"""`specroll lossless`: from an engine and heads to a verdict."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console

from services.config import RESERVED_TOKENS, DataConfig, EngineConfig, SpeculationConfig
from services.heads.target import TargetModel
from services.learner.prompts import load_prompts
from services.lossless.exact import Text
from services.lossless.greedy import divergences
from services.lossless.leaning import Leaning, LogprobGap, measure
from services.lossless.options import ALL_LAWS, LAWS, PLAIN, SPECULATION, WORD_PROBLEMS, LawUnderTest, LosslessOptions
from services.lossless.prefixes import choose_prefixes
from services.lossless.sampling import Draw, draw_all
from services.lossless.verdict import Check, Verdict
from services.machine import cores, quiet_libraries
from services.models import fetch_model
from services.output_file import check_output
from services.progress import progress_bar
from services.rollout.completion import Completion, EngineError
from services.rollout.engine import RolloutEngine
from services.rollout.heads_control import check_start_heads
from services.rollout.heads_file import load_heads
from services.rollout.policy_check import PolicyShape
from specroll_core.contracts import SamplingParams
from specroll_core.heads import FutureTokenHeads

# Of the longest completion, what one usually has; a wrong guess costs a second, smaller round of requests.
_USUAL_SHARE = 0.8

console = Console(highlight=False, soft_wrap=True)


def lossless_command(
    model: str, heads: Path, options: LosslessOptions, data: DataConfig = WORD_PROBLEMS, report: Path | None = None
) -> int:
    """Runs the proof and prints its verdict; 0 where it holds, 1 where it does not.

    report: file for the verdict as JSON. Raises ValueError for what a user can put right.
    """
    check_output("--json", report)
    try:
        verdict = prove(model, heads, options, data)
    except EngineError as error:
        Console(stderr=True).print(f"specroll: {error}")
        return 1
    console.print(verdict.as_table())
    if report is not None:
        report.write_text(json.dumps(verdict.as_json(), indent=2) + "\n")
    return 0 if verdict.passed else 1


def prove(model: str, heads_path: Path, options: LosslessOptions, data: DataConfig = WORD_PROBLEMS) -> Verdict:
    """Starts an engine, samples from it, compares, and stops it. Main thread only."""
    began = time.monotonic()
    quiet_libraries()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    threads = options.threads or len(cores())
    torch.set_num_threads(threads)
    directory = fetch_model(model)
    heads = load_heads(heads_path, "--heads").requires_grad_(False)
    check_start_heads(heads_path, PolicyShape(directory), directory, 0, "--heads")
    # Before the engine, which takes what memory it finds free.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = TargetModel(directory, getattr(torch, options.dtype), device)
    prompts = [p.ids for p in load_prompts(data, target.tokenizer, options.seed).train]
    config = _engine_config(options, heads_path, threads, max(map(len, prompts)))
    engine = RolloutEngine.start(
        config=config, dtype=options.dtype, model_dir=directory, policy_version=0, seed=options.seed
    )
    try:
        with asyncio.Runner() as runner:
            proof = Proof(engine, runner, target, heads.to(device), prompts, options, directory.name)
            proof.run()
    finally:
        engine.close()
    proof.verdict.seconds = time.monotonic() - began
    return proof.verdict


class Proof:
    """The parts of the proof, one after the other, on one engine. Results are added to `verdict`."""

    def __init__(
        self,
        engine: RolloutEngine,
        runner: asyncio.Runner,
        target: TargetModel,
        heads: FutureTokenHeads,
        prompts: Sequence[tuple[int, ...]],
        options: LosslessOptions,
        name: str,
    ) -> None:
        self.verdict = Verdict(name, options.dtype, options.nodes)
        self._engine = engine
        self._runner = runner
        self._target = target
        self._heads = heads
        self._prompts = prompts
        self._options = options
        self._ways = options.ways()

    def run(self) -> None:
        if self._options.dtype == "float32":
            self._frequencies(self._greedy())
        self._rollouts()

    def _greedy(self) -> list[Text]:
        """Compares at temperature 0; returns the texts of plain decoding."""
        options, verdict = self._options, self.verdict
        prompts = list(islice(cycle(self._prompts), options.greedy_prompts))
        sampling = SamplingParams(temperature=0, max_new_tokens=options.greedy_tokens)
        # At temperature 0 both rules are the same walk.
        plain, speculative = (
            self._draw(f"greedy {way}", [Draw(prompt, sampling, self._ways[way]) for prompt in prompts])
            for way in (PLAIN, SPECULATION)
        )
        verdict.divergences = divergences(self._target, prompts, plain, speculative)
        verdict.greedy_tokens = sum(len(c.token_ids) for c in speculative)
        verdict.greedy_prompts = len(prompts)
        return [Text(prompt, c.token_ids, i) for i, (prompt, c) in enumerate(zip(prompts, plain, strict=True))]

    def _frequencies(self, texts: Sequence[Text]) -> None:
        options = self._options
        chosen = choose_prefixes(self._target, texts, LAWS, options)
        cells = [(law, i, p, way) for law, some in chosen.items() for i, p in enumerate(some) for way in self._ways]
        draws = [p.draw(law, self._ways[way]) for law, _, p, way in cells for _ in range(options.draws)]
        completions = self._draw("fixed prefixes", draws)
        for (law, i, prefix, way), some in zip(cells, _split(completions, options.draws), strict=True):
            counts = prefix.counts(some)
            self.verdict.checks.append(
                Check("frequencies", way, str(law), f"prefix {i}", int(counts.sum()), prefix.p_value(counts))
            )

    def _rollouts(self) -> None:
        """Samples ordinary completions and follows them under the exact laws."""
        heads = self._heads if self._options.dtype == "float32" else None
        found: dict[str, dict[LawUnderTest, Leaning]] = {}
        for way in self._ways:
            found[way], gaps = {}, LogprobGap()
            sampled = self._sample(way)
            total = sum(len(c.token_ids) for _, some in sampled.values() for c in some)
            with progress_bar("exact laws", total) as step:
                before = 0
                for law, (prompts, completions) in sampled.items():
                    found[way][law] = measure(
                        self._target, heads, law, prompts, completions, gaps, partial(_add, step, before)
                    )
                    before += sum(len(c.token_ids) for c in completions)
            self.verdict.logprobs[way] = gaps
            self._note_acceptance(way, [c for _, some in sampled.values() for c in some])
            self.verdict.outside += sum(leaning.outside for leaning in found[way].values())
            if heads is not None:
                self._judge(way, found[way])
        if heads is not None:
            tests = len(self.verdict.checks)
            self.verdict.detectable = {
                way: Leaning.together([*some.values()]).detectable(tests) for way, some in found.items()
            }

    def _judge(self, way: str, found: dict[LawUnderTest, Leaning]) -> None:
        checks = self.verdict.checks
        for law, leaning in found.items():
            *by_head, betting = leaning.p_values
            for k, (p, z) in enumerate(zip(by_head, leaning.z, strict=True), 1):
                checks.append(Check("leaning", way, str(law), f"head {k}", leaning.tokens, p, z))
            checks.append(Check("betting", way, str(law), "all heads", leaning.tokens, betting))
        together = Leaning.together([*found.values()])
        checks.append(Check("betting", way, ALL_LAWS, "all heads", together.tokens, together.p_values[-1]))

    def _sample(self, way: str) -> dict[LawUnderTest, tuple[list[tuple[int, ...]], list[Completion]]]:
        """Completions of every law, of `options.rollout_tokens` tokens or a little more, with their prompts."""
        options, following = self._options, cycle(self._prompts)
        found: dict[LawUnderTest, tuple[list[tuple[int, ...]], list[Completion]]] = {law: ([], []) for law in LAWS}
        while missing := {law: n for law, some in found.items() if (n := self._missing(some[1])) > 0}:
            asked = [(law, prompt) for law, n in missing.items() for prompt in islice(following, n)]
            draws = [Draw(prompt, law.sampling(options.longest), self._ways[way]) for law, prompt in asked]
            for (law, prompt), completion in zip(asked, self._draw(way, draws), strict=True):
                found[law][0].append(prompt)
                found[law][1].append(completion)
        return found

    def _missing(self, completions: Sequence[Completion]) -> int:
        """Completions that the wanted tokens still need, at the mean length so far."""
        tokens = sum(len(c.token_ids) for c in completions)
        mean = tokens / len(completions) if completions else _USUAL_SHARE * self._options.longest
        return max(0, math.ceil((self._options.rollout_tokens - tokens) / mean))

    def _note_acceptance(self, way: str, completions: Sequence[Completion]) -> None:
        """The prefill's token is of no verify step."""
        steps = sum(c.spec.verify_steps for c in completions)
        if steps:
            self.verdict.acceptance_length[way] = sum(len(c.token_ids) - 1 for c in completions) / steps

    def _draw(self, name: str, draws: Sequence[Draw]) -> list[Completion]:
        with progress_bar(name, len(draws)) as step:
            return self._runner.run(draw_all(self._engine, draws, at_once=2 * self._options.running, progress=step))


def _add(step: Callable[[int], None], before: int, done: int) -> None:
    step(before + done)


def _split(completions: Sequence[Completion], size: int) -> Iterator[Sequence[Completion]]:
    return (completions[i : i + size] for i in range(0, len(completions), size))


def _engine_config(options: LosslessOptions, heads: Path, threads: int, longest_prompt: int) -> EngineConfig:
    context = longest_prompt + max(options.longest, options.greedy_tokens) + RESERVED_TOKENS
    return EngineConfig(
        threads=threads,
        context_length=context,
        max_running_requests=options.running,
        # Every request that runs fits to its end.
        max_total_tokens=options.running * context,
        speculation=SpeculationConfig(
            enabled=True,
            heads=heads,
            nodes=options.nodes,
            max_nodes=options.nodes,
            correction_form=options.correction_form,
            planted_bias=options.planted_bias,
        ),
    )
