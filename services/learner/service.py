"""The learner service: owns the prompts and the policy, trains, publishes.

The loop is `Learner.run`. Everything else here wires parts together and takes them apart again.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services import queue
from services.common import grpc_setup, lifecycle
from services.common.artifacts import ArtifactStore
from services.common.keys import RunKeys
from services.common.metrics import Metrics
from services.common.streams import ExclusiveLock, StreamConsumer
from services.config import Config
from services.config_loader import digest
from services.learner import checkpoint
from services.learner.batches import BatchAssembler
from services.learner.evaluation import Evaluation, evaluate
from services.learner.grpc_server import LearnerServicer
from services.learner.lease_desk import LeaseDesk
from services.learner.overlap import Overlap
from services.learner.prompts import load_prompts
from services.learner.report import ReportBuilder
from services.learner.trainer import StepInterrupted, Trainer
from services.learner.workers import Workers
from services.models import load_tokenizer
from services.run_dir import RunDir
from specroll.v1 import learner_pb2_grpc
from specroll_core.contracts import TrajectoryGroup
from specroll_core.ledger import LedgerState

log = logging.getLogger(__name__)

# Policy versions kept on disk beside the current one: a worker may still be reading the one before.
_KEEP_POLICIES = 3
# A worker that has been silent for this many heartbeats is forgotten; its leases expire by themselves.
_SILENT_HEARTBEATS = 10
# A learner that was killed holds its role for as long as its lock lives.
_LOCK_SECONDS = 30.0
# Workers load SGLang before they serve anything.
_FIRST_WORKER_SECONDS = 600.0
_STATUS_SECONDS = 5.0


class Learner:
    """One learner process. `stop` ends it after the current micro-batch, with a checkpoint of the steps done."""

    def __init__(self, config: Config, model_dir: Path, *, resume: bool, stop: threading.Event) -> None:
        self.config = config
        self.stop = stop
        self.run_dir = RunDir(config.run.dir)
        self.metrics = Metrics(self.run_dir.metrics, tensorboard=config.logging.tensorboard, service="learner")
        settings = config.learner
        if settings.metrics_port:
            self.metrics.serve(settings.metrics_port, settings.host)

        saved = checkpoint.latest(self.run_dir.checkpoints) if resume else None
        # Always from the model's own directory, which stays: what a policy version holds beside the weights is copied
        # from there. The checkpoint then brings its weights.
        self.trainer = Trainer(config, model_dir)
        extra: dict[str, Any] = checkpoint.load(saved.path, self.trainer) if saved else {}
        state = LedgerState.from_json(extra["ledger"]) if saved else None
        self.prompts = load_prompts(config.data, load_tokenizer(model_dir), config.run.seed)
        self.desk = LeaseDesk(config, self.prompts, incarnation=secrets.token_hex(4), state=state)
        self.report = ReportBuilder(config, self.run_dir, started_at=time.time(), resumed_at_step=self.desk.step)
        self.overlap = Overlap()
        self.last_step_at = time.monotonic()

        client, keys = queue.connect(config), RunKeys(self.run_dir.run_id)
        self.lock = ExclusiveLock(client, keys, "learner")
        self.lock.acquire(_LOCK_SECONDS)
        self.consumer = StreamConsumer(
            client, keys.trajectories, queue.limits(config), f"learner-{secrets.token_hex(4)}", lock=self.lock
        )
        self.batches = BatchAssembler(
            self.consumer, self.desk, queue.limits(config), batch_timeout=settings.batch_timeout_seconds
        )
        self.batches.adopt()

        self.policies = ArtifactStore(self.run_dir.policies)
        # Versions made after the checkpoint are gone with the process that made them; their numbers come again.
        self.policies.discard(lambda version: version >= self.desk.step)
        self.workers = Workers(
            lambda address: grpc_setup.channel(address, security=config.security),
            pause_mode=config.rollout.pause_mode,
            stale_seconds=_SILENT_HEARTBEATS * settings.heartbeat_seconds,
        )
        self.servicer = LearnerServicer(
            self.desk,
            self.workers,
            self.policies,
            config_digest=digest(config),
            heartbeat_seconds=settings.heartbeat_seconds,
            run_id=self.run_dir.run_id,
        )
        self.publish()
        self.server = grpc_setup.server(settings.host, settings.port, security=config.security)
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self.servicer, self.server.grpc)

    def run(self) -> bool:
        """Trains until the last step; False when it was stopped before.

        Consumes trajectory groups from the stream, produces policy versions. Waits for groups; unblocked by
        workers that finish one. Raises when waiting is pointless.
        """
        self.server.start()
        if self.desk.step == 0:
            self.evaluate()
        self.desk.open()
        self.last_step_at = time.monotonic()
        while not self.desk.finished:
            waited_from = time.monotonic()
            groups = self.batches.next_batch(self.stop, self.check_liveness)
            if groups is None:
                break
            waited = time.monotonic() - waited_from
            try:
                values = self.train(groups)
            except StepInterrupted:
                break  # nothing of the step was applied: its groups stay in the stream
            self.batches.complete(groups)
            if self.desk.step % self.config.learner.publish_every == 0 or self.desk.finished:
                self.publish()
            self.record(groups, values, waited)
            every = self.config.eval.every
            if every and self.desk.step % every == 0 and not self.desk.finished:
                self.evaluate()
            due = self.desk.step % self.config.learner.checkpoint_every == 0
            if due or self.desk.finished or self.batches.queue_needs_room():
                self.checkpoint()
        if not self.desk.finished:
            self.checkpoint()
            log.info("stopped after step %d; `specroll train --resume` goes on from here", self.desk.step)
            return False
        self.evaluate()
        return not self.stop.is_set()

    def train(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        started = time.time()
        values = self.trainer.step(groups, should_stop=self.stop.is_set)
        self.overlap.add(groups, started, time.time())
        return values

    def publish(self) -> None:
        """Writes the current policy as a version and tells the workers, without waiting for them."""
        artifact = self.policies.publish(self.desk.step, self.trainer.save_policy, step=self.desk.step)
        self.workers.publish(artifact)
        self.policies.prune(keep=_KEEP_POLICIES)

    def checkpoint(self) -> None:
        """Saves the steps done, then acknowledges their groups: in this order, so that a crash between the two
        trains nothing twice (the checkpoint knows) and loses nothing."""
        path = checkpoint.save(
            self.run_dir.checkpoints,
            self.trainer,
            extra={"ledger": self.desk.state().to_json()},
            keep=self.config.learner.keep_checkpoints,
        )
        self.batches.acknowledge_trained()
        log.info("checkpoint of step %d in %s", self.desk.step, path)

    def evaluate(self) -> None:
        """Accuracy of the current policy on held-out prompts, kept for the report."""
        count = min(self.config.eval.prompts, len(self.prompts.holdout))
        if count == 0 or self.stop.is_set():
            return
        workers = self.workers.wait_serving(self.desk.step, _FIRST_WORKER_SECONDS, self.stop)
        if not workers:
            return
        log.info("evaluating policy version %d on %d held-out prompts", self.desk.step, count)
        result: Evaluation = evaluate(
            self.config, self.prompts.holdout[:count], workers, step=self.desk.step, stop=self.stop
        )
        self.report.add_evaluation(result)
        self.metrics.write("eval", self.desk.step, {k: float(v) for k, v in asdict(result).items() if k != "step"})
        log.info("held-out reward %.3f [%.3f, %.3f]", result.reward, result.low, result.high)

    def record(self, groups: list[TrajectoryGroup], values: dict[str, float], waited: float) -> None:
        counts, now = self.desk.counts(), time.monotonic()
        values["rollout/tokens_per_second"] = values["batch/tokens"] / (now - self.last_step_at)
        self.last_step_at = now
        values |= {
            f"queue/{name}": float(counts[name]) for name in ("leased", "ready", "expired_total", "returned_total")
        }
        values |= {f"queue/{name}": float(n) for name, n in self.batches.counters.items()}
        values |= {"seconds/wait": waited, "update/pause_seconds": self.workers.pause_seconds}
        self.metrics.write("train", self.desk.step, values, {"group_ids": [group.group_id for group in groups]})
        self.report.add_step(values)

    def check_liveness(self) -> None:
        """Raises when nobody will ever fill a batch: the lock on the run is lost."""
        self.lock.check()
        for worker_id in self.workers.forget_silent():
            log.warning("worker %s has been silent for too long and is forgotten until it registers again", worker_id)

    def finish(self, completed: bool) -> None:
        """Tells the workers that the run is over and writes the report."""
        self.servicer.finished = completed
        self.report.speculation = self.workers.speculation(_STATUS_SECONDS)
        self.report.write(self.checkpoint_path(), self.overlap, completed=completed)
        if completed:
            # The last version is in the checkpoint.
            shutil.rmtree(self.run_dir.policies, ignore_errors=True)
            # Heartbeats carry the news; a worker that misses them notices the closed server.
            deadline = lifecycle.Deadline(5 * self.config.learner.heartbeat_seconds)
            while self.workers.ids() and not deadline.expired and not self.stop.is_set():
                self.stop.wait(0.1)
                self.workers.forget_silent()

    def checkpoint_path(self) -> Path | None:
        saved = checkpoint.latest(self.run_dir.checkpoints)
        return saved.policy_dir if saved else None

    def close(self) -> None:
        self.server.stop()
        self.workers.close()
        self.lock.release()
        self.metrics.close()
