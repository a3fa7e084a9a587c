"""The trainer: a process of its own, with few threads and a low priority, that trains heads and judges them.

`python -m services.watcher.train_process DIRECTORY`. SIGTERM makes it save where it stands and leave; started again
with the same directory it goes on from there. Exit codes: 0 with a result, 75 when it was interrupted, 1 on failure.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.logs import setup_logging
from services.heads.artifact import load_artifact
from services.heads.fingerprint import ModelFingerprint, output_weights
from services.heads.train import FREQUENT, by_frequency, frequent_tokens, restrict
from services.machine import computing_dtype
from services.rollout.heads_file import read_heads, save_heads
from services.watcher.gate import shadow_evaluation
from services.watcher.job import JobDirectory, TrainJob
from services.watcher.rows import ChosenRows
from specroll_core.head_training import HeadRows, HeadTrainConfig, TrainPosition, train_heads
from specroll_core.heads import FutureTokenHeads, HeadsSpec

log = logging.getLogger(__name__)

INTERRUPTED = 75  # EX_TEMPFAIL
_TOP = 32
_LAW_ROWS = 256
_SAVE_SECONDS = 10.0
# Weight of the squared distance from the heads that training began with beside the mean loss of so many rows.
_ANCHOR, _ANCHOR_ROWS = 0.003, 4000
# Few rows are passed over more often, up to so often, until as many of them were taken in all. 4,000 rows of a policy
# that had moved far brought heads to 92 % of those trained at length in three passes, to 97 % in eight.
_ROWS_IN_ALL, _MOST_EPOCHS = 32_000, 16


class _Interrupted(Exception):
    pass


class _TimeUp(Exception):
    pass


def main(directory: Path) -> int:
    setup_logging("trainer", "info")
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        run(JobDirectory(directory), stop.is_set)
    except _Interrupted:
        log.info("interrupted; the training goes on from here when it is started again")
        return INTERRUPTED
    return 0


def run(files: JobDirectory, should_stop: Callable[[], bool]) -> None:
    """Trains as the job says and writes its result."""
    began, cpu = time.monotonic(), time.process_time()
    job = files.job()
    training, held_out = files.rows()
    model = ModelFingerprint.of(Path(job.policy_dir))
    lm_head, embedding = output_weights(Path(job.policy_dir))
    lm_head, embedding = lm_head.float(), embedding.float()
    # Products with the LM head are most of the work, and in bfloat16, where the machine multiplies in it, they take
    # half as long at the same loss.
    products = lm_head.to(getattr(torch, computing_dtype()))
    serving = load_artifact(Path(job.heads_dir)).heads if job.heads_dir else None
    begun = read_heads(files.begin_file) if files.begin_file.exists() else serving
    heads = _begin(job, begun, lm_head)
    rows = with_laws(training, products, should_stop)
    ids = frequent_tokens(rows, lm_head.shape[0], FREQUENT)
    kept, coverage = restrict(rows, ids, lm_head.shape[0])
    losses, steps = _train(files, job, heads, kept, products[ids], embedding, should_stop, warm=begun is not None)
    heads.vocabulary = proposed = vocabulary(by_frequency(rows, lm_head.shape[0]), begun)
    trained = time.monotonic()
    temperature, top_p, top_k, min_p = held_out.law
    gate = shadow_evaluation(
        heads,
        serving,
        _as_rows(held_out),
        lm_head,
        embedding,
        nodes=job.nodes,
        law={"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p},
        sampled_children=job.sampled_children,
        proposed=proposed.sort().values,  # as a worker does; over all tokens it would take several times as long
    )
    save_heads(heads, files.heads_file)
    files.finish({
        "gate": gate.to_json(),
        "model": asdict(model),
        "rows": len(training),
        "held_out_rows": len(held_out),
        "prompts": len(training.prompt.unique()),
        "temperature": training.law[0],
        "policy_versions": list(training.policies),
        "steps": steps,
        "loss_first": losses[0],
        "loss_last": losses[1],
        "coverage": coverage,
        "train_seconds": trained - began,
        "gate_seconds": time.monotonic() - trained,
        "cpu_seconds": time.process_time() - cpu,
        "job": asdict(job),
    })  # fmt: skip
    log.info(
        "trained %d steps on %d rows in %.0f s; %.3f tokens per step on held-out prompts against %.3f (%+.3f to %+.3f)",
        steps, len(training), trained - began, gate.new, gate.old, gate.low, gate.high,
    )  # fmt: skip


def anchor(rows: int) -> float:
    """`HeadTrainConfig.anchor` for a training on so many rows: what was known before is one opinion beside theirs, so
    that beside their mean it weighs as one over their number."""
    return _ANCHOR * _ANCHOR_ROWS / rows


def passes(rows: int, epochs: int) -> int:
    """How often a training on so many rows takes each of them. epochs: at least."""
    return max(epochs, min(_MOST_EPOCHS, math.ceil(_ROWS_IN_ALL / rows)))


def vocabulary(seen: Tensor, begun: FutureTokenHeads | None) -> Tensor:
    """[M] int64: the tokens that a training saw, by falling frequency, and after them those of the heads that it began
    with, since few rows hold few of the tokens that are still to come."""
    known = None if begun is None else begun.vocabulary
    if known is not None:
        seen = torch.cat([seen, known[~torch.isin(known, seen)]])
    return seen[:FREQUENT].clone()


@torch.no_grad()
def with_laws(rows: ChosenRows, lm_head: Tensor, should_stop: Callable[[], bool] = lambda: False) -> HeadRows:
    """Rows with the most likely tokens of their laws at temperature 1, computed from the states."""
    ids, logprobs = [], []
    for chunk in rows.hidden.split(_LAW_ROWS):
        if should_stop():
            raise _Interrupted
        logits = F.linear(chunk.to(lm_head.dtype), lm_head).float()
        values, top = logits.topk(min(_TOP, logits.shape[-1]))
        ids.append(top)
        logprobs.append(values - logits.logsumexp(-1, keepdim=True))
    return _as_rows(rows, torch.cat(ids), torch.cat(logprobs))


def _as_rows(rows: ChosenRows, ids: Tensor | None = None, logprobs: Tensor | None = None) -> HeadRows:
    none = torch.zeros(len(rows), 1, dtype=torch.int64)
    return HeadRows(
        rows.tokens,
        rows.hidden.float(),
        none if ids is None else ids,
        none.float() if logprobs is None else logprobs,
        rows.sequence,
        rows.prompt,
    )


def _begin(job: TrainJob, begun: FutureTokenHeads | None, lm_head: Tensor) -> FutureTokenHeads:
    torch.manual_seed(job.seed)
    if begun is None:
        return FutureTokenHeads(HeadsSpec(job.heads, lm_head.shape[1], job.rank, lm_head.shape[0]))
    made = FutureTokenHeads(begun.spec)
    made.load_in_place(begun.state_dict())
    return made


def _train(
    files: JobDirectory,
    job: TrainJob,
    heads: FutureTokenHeads,
    rows: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    should_stop: Callable[[], bool],
    *,
    warm: bool,
) -> tuple[tuple[float, float], int]:
    """Trains in place until the end or until the time is up. Returns the first and the last loss, and the steps."""
    near = anchor(len(rows)) if warm else 0.0  # heads that begin from nothing have nothing to stay near to
    config = HeadTrainConfig(epochs=passes(len(rows), job.epochs), anchor=near, holdout=0.0, seed=job.seed)
    end = time.monotonic() + job.seconds
    saved_at = time.monotonic()
    losses: list[float] = []
    done = 0

    def position(at: TrainPosition) -> None:
        nonlocal saved_at
        if should_stop() or time.monotonic() - saved_at > _SAVE_SECONDS:
            files.save_position(heads, at)
            saved_at = time.monotonic()
        if should_stop():
            raise _Interrupted

    def progress(step: int, _steps: int, loss: float) -> None:
        nonlocal done
        done = step
        losses.append(loss)
        if time.monotonic() > end:
            raise _TimeUp

    resume = files.load_position(heads)
    try:
        train_heads(heads, rows, lm_head, embedding, config, progress, position=position, resume=resume)
    except _TimeUp:
        log.warning("training stops after %d steps: its %.0f s are over", done, job.seconds)
    tail = losses[-max(1, len(losses) // 10) :] or [float("nan")]
    return (losses[0] if losses else 0.0, sum(tail) / len(tail) if losses else 0.0), done


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except Exception as error:  # the edge of the process: the reason is on its last line
        log.exception("the training failed")
        sys.stderr.write(json.dumps({"error": str(error)}) + "\n")
        sys.exit(1)
