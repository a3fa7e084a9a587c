"""The watcher service: keeps the heads good while the policy moves.

The loop is `Watcher.run`; what to do is decided in `watch.py`, how heads are trained in `train_process.py`, how they
reach the workers in `fleet.py`.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from typing import Any

import redis
import torch
from google.protobuf.message import DecodeError

from services import queue
from services.common import grpc_setup
from services.common.artifacts import Artifact
from services.common.keys import RunKeys
from services.common.metrics import Metrics
from services.common.row_frames import RowFrame
from services.common.row_stream import RowStream
from services.common.run_board import CurrentHeads, RunBoard
from services.common.streams import ExclusiveLock, StreamConsumer, StreamError
from services.config import Config
from services.heads.artifact import HeadsManifest, TrainedOn, artifact_directory, load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.heads.registry import HeadsRegistry
from services.rollout.heads_feedback import FEEDBACK_LIMITS
from services.rollout.heads_file import HEADS_FILE, load_heads, read_heads, weights_checksum
from services.run_dir import RunDir
from services.watcher.fleet import Fleet
from services.watcher.grpc_server import WatcherServicer
from services.watcher.job import JobDirectory, TrainJob
from services.watcher.policy_source import PolicySource
from services.watcher.recall import recall
from services.watcher.records import FeedbackLog, drift_records
from services.watcher.rows import RowBuffer
from services.watcher.trainer import Trainer, TrainingFailed
from specroll.v1 import feedback_pb2, watcher_pb2_grpc
from specroll_core.drift import DriftConfig

log = logging.getLogger(__name__)

_LOCK_SECONDS = 30.0
_WAIT_SECONDS = 0.5
_WORKERS_SECONDS = 2.0
_ROWS_SECONDS = 1.0
_FRAMES = 64
# Training begins only with so many held-out prompts: with fewer the gate could not pass.
_MIN_HELD_OUT_PROMPTS = 6
# Standard errors of a fall from which on a check leaves a doubt.
_DOUBTFUL = 2.0
# Heads that begin from nothing need more passes than those that are brought up to date.
_COLD_EPOCHS = 5
# A gain, as a share of what the serving heads do, that is worth training again with more rows where it is possible.
_WORTHWHILE = 0.02


class Watcher:
    """One per run, which its lock sees to. `stop` ends it; a training that runs saves where it stands."""

    def __init__(self, config: Config, run_id: str, *, stop: threading.Event) -> None:
        self.config = config
        self.stop = stop
        self.run_id = run_id
        settings = config.watcher
        run_dir = RunDir(config.run.dir)
        root = run_dir.root / "watcher"
        self.metrics = Metrics(run_dir.metrics, service="watcher", tensorboard=config.logging.tensorboard)
        if settings.metrics_port:
            self.metrics.serve(settings.metrics_port, settings.host)
        client, keys = queue.connect(config), RunKeys(run_id)
        self.lock = ExclusiveLock(client, keys, "watcher")
        self.lock.acquire(_LOCK_SECONDS)
        name = f"watcher-{secrets.token_hex(4)}"
        self.consumer = StreamConsumer(client, keys.feedback, FEEDBACK_LIMITS, name, lock=self.lock)
        self.row_stream = RowStream(client, keys.feedback_rows, settings.max_row_bytes)
        self.board = RunBoard(client, keys)
        self.registry = HeadsRegistry(run_dir.root / "heads", keep=settings.keep_versions)
        self.policies = PolicySource(config, root / "policies")
        self.buffer = RowBuffer(settings.max_rows, 2 * settings.gate_rows, settings.holdout)
        self.trainer = Trainer(root / "jobs", threads=settings.threads, nice=settings.nice)
        self.fleet = Fleet(lambda address: grpc_setup.channel(address, security=config.security))
        self.current = self._first_version()
        recorded = root / "feedback.jsonl"
        self.watch = recall(recorded, drift_config(config), self.current.version if self.current else 0)
        self.log = FeedbackLog(recorded)
        # Rows received when acceptance was last as it should be: what drift is learned from came after.
        self._healthy_at = self._fresh_from = 0
        # The degradation for which the serving copies were found to be as published.
        self._looked_at: float | None = None
        # Rows that the next training of a version begins with.
        self._needed = settings.min_rows
        self._rows_after = "0"
        self._rows_at = self._workers_at = 0.0
        self.server = grpc_setup.server(settings.host, settings.port, security=config.security)
        watcher_pb2_grpc.add_WatcherServiceServicer_to_server(WatcherServicer(self), self.server.grpc)

    @property
    def phase(self) -> str:
        if self.trainer.running:
            return "training"
        return "watching" if self.watch.version else "collecting"

    def run(self) -> None:
        """Reads feedback, tends training and workers, until `stop` is set; waits for feedback, half a second at most.

        Raises LockLost where another watcher has taken over.
        """
        self.server.start()
        self._name_current()
        self.trainer.resume()
        threading.Thread(target=self._abort_calls_on_stop, name="stop", daemon=True).start()
        while not self.stop.is_set():
            self.lock.check()
            with self.metrics.guard("feedback"):
                self._read_statistics()
                self._read_rows()
            with self.metrics.guard("training"):
                self._tend_training()
            with self.metrics.guard("workers"):
                self._tend_workers()

    def close(self) -> None:
        self.trainer.stop()
        self.server.stop()
        self.fleet.close()
        self.lock.release()
        self.log.close()
        self.metrics.close()

    def _abort_calls_on_stop(self) -> None:
        """A worker that does not answer must not hold up the end."""
        self.stop.wait()
        self.fleet.abort()

    def _read_statistics(self) -> None:
        try:
            deliveries = self.consumer.read(64, _WAIT_SECONDS)
        except StreamError as error:
            log.warning("feedback cannot be read: %s", error)
            self.stop.wait(_WAIT_SECONDS)
            return
        for delivery in deliveries:
            try:
                batch = feedback_pb2.FeedbackBatch.FromString(delivery.payload)
                records = [record for trajectory in batch.trajectories for record in drift_records(trajectory)]
            except (DecodeError, ValueError) as error:
                delivery.dead_letter(f"no verifier feedback: {error}")
                self.metrics.count("feedback/malformed/total")
                continue
            for record in records:
                self.log.write("record", record.to_json())
                for kind, facts in self.watch.observe(record).happened:
                    self._event(kind, **facts)
                    self._mark_fresh_rows(kind, facts)
            delivery.ack()

    def _mark_fresh_rows(self, kind: str, facts: dict[str, Any]) -> None:
        # A drift begins before it is sure: what came since the last check without any doubt belongs to it.
        if kind == "check" and not facts["degraded"] and (facts["z"] or 0.0) < _DOUBTFUL:
            self._healthy_at = self.buffer.received
        elif kind == "degraded":
            self._fresh_from, self._needed = self._healthy_at, self.config.watcher.min_rows

    def _read_rows(self) -> None:
        if time.monotonic() < self._rows_at:
            return
        self._rows_at = time.monotonic() + _ROWS_SECONDS
        while not self.stop.is_set():
            try:
                frames = self.row_stream.read(self._rows_after, _FRAMES)
            except redis.RedisError as error:
                log.debug("rows cannot be read: %s", error)
                return
            for entry, data in frames:
                self._rows_after = entry
                try:
                    self.buffer.add(RowFrame.from_bytes(data))
                except ValueError as error:
                    self.metrics.count("rows/malformed/total")
                    log.debug("rows are left out: %s", error)
            if len(frames) < _FRAMES:
                return

    def _tend_training(self) -> None:
        if self.watch.wants_rollback:
            self._roll_back(self.watch.wants_rollback)
        if self.trainer.running:
            try:
                done = self.trainer.poll()
            except TrainingFailed as error:
                self.watch.failed(time.time())
                self._event("training_failed", reason=str(error))
                return
            if done is not None:
                self._judge(*done)
            return
        if not self.watch.wants_training(time.time()):
            return
        degraded = self.watch.degraded_since
        if degraded is not None and degraded != self._looked_at and self.current is not None:
            if self._repair(self.current):
                return
            self._looked_at = degraded
        if self._enough_rows():
            self._train()

    def _enough_rows(self) -> bool:
        settings, since = self.config.watcher, self._fresh_from
        held = min(settings.gate_rows, settings.min_rows) // 4
        return (
            self.buffer.count(held_out=False, since=since) >= min(self._needed, settings.max_rows)
            and self.buffer.count(held_out=True, since=since) >= held
            and self.buffer.prompts(held_out=True, since=since) >= _MIN_HELD_OUT_PROMPTS
        )

    def _repair(self, current: Artifact) -> bool:
        """Puts copies right that are not what was published. Whether there were any."""
        dtype = torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32
        expected = weights_checksum(read_heads(current.path / HEADS_FILE).state_dict(), dtype)
        live = self.fleet.live_checksums()
        wrong = [w for w in self.fleet.workers() if live.get(w.worker_id, expected) != expected]
        if not wrong:
            return False
        taken = self.fleet.swap(current, wrong)
        self._event("repaired", version=current.version, workers=len(taken), wrong=len(wrong))
        if taken:
            self.watch.repaired()
        return True

    def _train(self) -> None:
        settings, config = self.config.watcher, self.config
        policy = self.policies.current()
        cold = self.current is None
        job = TrainJob(
            policy_dir=str(policy.path),
            heads_dir="" if self.current is None else str(self.current.path),
            serving=self.watch.version,
            heads=config.heads.heads,
            rank=config.heads.rank,
            epochs=_COLD_EPOCHS if cold else settings.epochs,
            seconds=settings.train_seconds,
            nodes=settings.gate_nodes,
            sampled_children=config.rollout.engine.speculation.rule == "sampled_child",
            seed=config.run.seed,
        )
        training = self.buffer.training(settings.max_rows, self._fresh_from)
        held_out = self.buffer.held_out(settings.gate_rows, self._fresh_from)
        self.trainer.start(job, training, held_out)
        self._event("training", rows=len(training), held_out_rows=len(held_out), policy=policy.version, cold=cold)

    def _judge(self, files: JobDirectory, result: dict[str, Any]) -> None:
        gate = result["gate"]
        self._event("gate", serving=result["job"]["serving"], **gate)
        stale = result["job"]["serving"] != self.watch.version
        if stale or not gate["passed"]:
            undecided = gate["high"] > _WORTHWHILE * gate["old"] and result["rows"] < self.config.watcher.max_rows
            if not stale:
                self.watch.refused(time.time(), undecided=undecided)
                if undecided:
                    self._needed = 2 * result["rows"]
            self._event("refused", difference=gate["difference"], low=gate["low"], stale=stale, undecided=undecided)
        else:
            self._publish(files, result)
        self.trainer.discard(files)

    def _publish(self, files: JobDirectory, result: dict[str, Any]) -> None:
        trained_on = TrainedOn(
            rows=result["rows"],
            prompts=result["prompts"],
            source="verifier feedback",
            temperature=result["temperature"],
            policy_versions=(result["policy_versions"][0], result["policy_versions"][1]),
        )
        report = {name: result[name] for name in ("held_out_rows", "steps", "train_seconds", "cpu_seconds")}
        gate = {name: value for name, value in result["gate"].items() if name != "prompts"}
        manifest = HeadsManifest(
            ModelFingerprint(**result["model"]), trained_on, self.watch.version or None, {**gate, **report}
        )
        self.current = self.registry.publish(read_heads(files.heads_file), manifest)
        self.watch.swapped(self.current.version)
        self._needed = 2 * result["rows"]
        self.watch.improving = result["rows"] < self.config.watcher.max_rows
        self._event(
            "published",
            version=self.current.version,
            rows=result["rows"],
            predicted=gate["new"],
            improving=self.watch.improving,
        )
        self._name_current()
        self._swap_everybody()

    def _roll_back(self, reason: str) -> None:
        version = self.watch.version
        back = self.registry.roll_back(version, reason)
        self._event("rolled_back", version=version, to=back.version if back else 0, reason=reason)
        if back is not None:
            self.current = back
        else:
            self.current = None  # what serves goes on serving: it is worse than others, not harmful
        self.watch.rolled_back(back.version if back else 0)
        self._name_current()
        self._swap_everybody()

    def _tend_workers(self) -> None:
        if time.monotonic() < self._workers_at:
            return
        self._workers_at = time.monotonic() + _WORKERS_SECONDS
        self.fleet.follow(self.board.workers())
        self._swap_everybody()
        last = self.watch.last
        values = {
            "heads/version": self.watch.version,
            "rows/training": self.buffer.count(held_out=False),
            "rows/held_out": self.buffer.count(held_out=True),
            "workers/known": len(self.fleet.workers()),
            "acceptance/conditional": last.acceptance if last else 0.0,
            "acceptance/reference": last.reference if last else 0.0,
        }
        for name, value in values.items():
            self.metrics.gauge(name).set(value)

    def _swap_everybody(self) -> None:
        if self.current is None:
            return
        behind = self.fleet.behind(self.current)
        if not behind:
            return
        taken = self.fleet.swap(self.current, behind)
        self._event(
            "swapped",
            version=self.current.version,
            workers=len(taken),
            failed=len(behind) - len(taken),
            commit_ms=1000 * self.fleet.commit_seconds,
        )

    def _first_version(self) -> Artifact | None:
        """The registry's current version; heads that the configuration brings become the first one."""
        found = self.registry.current()
        given = self.config.initial_heads
        if found is not None or given is None or self.registry.store.versions():
            return found
        directory = artifact_directory(given)
        if directory.is_dir():
            loaded = load_artifact(directory)
            return self.registry.publish(loaded.heads, HeadsManifest(loaded.manifest.model, loaded.manifest.trained_on))
        model = ModelFingerprint.of(self.policies.current().path)
        return self.registry.publish(load_heads(given), HeadsManifest(model, TrainedOn(0, 0, str(given.name))))

    def _name_current(self) -> None:
        settings, current = self.config.watcher, self.current
        wildcard = settings.host in ("0.0.0.0", "::")  # noqa: S104
        host = settings.advertise or (socket.gethostname() if wildcard else settings.host)
        address = f"{host}:{self.server.port}"
        self.board.set_heads(
            CurrentHeads(current.version, current.digest, str(current.path), address)
            if current is not None
            else CurrentHeads(0, "", "", address)
        )

    def _event(self, kind: str, **facts: Any) -> None:
        """To the feedback log, the metrics and, unless it is one of many, the operator's log."""
        at = {"time": time.time()}
        self.log.write(kind, facts | at)
        self.metrics.count(f"{kind}/total")
        numbers = {f"{kind}/{k}": float(v) for k, v in facts.items() if isinstance(v, int | float)}
        words = {f"{kind}/{k}": v for k, v in facts.items() if isinstance(v, str)}
        self.metrics.write(kind, self.watch.version, numbers, words)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items() if k != "prompts"}
        level = {"check": logging.DEBUG, "alarm": logging.ERROR, "worse": logging.WARNING}.get(kind, logging.INFO)
        log.log(level, "%s: %s", kind.replace("_", " "), json.dumps(shown, default=str))


def drift_config(config: Config) -> DriftConfig:
    settings = config.watcher
    return DriftConfig(
        check_records=settings.check_records,
        reference_records=4 * settings.check_records,
        patience=settings.patience,
        cooldown_seconds=settings.cooldown_seconds,
    )
