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

import torch

from services import queue
from services.common import grpc_setup
from services.common.artifacts import ArtifactError
from services.common.keys import RunKeys
from services.common.metrics import Metrics
from services.common.row_stream import RowStream
from services.common.run_board import CurrentHeads, RunBoard
from services.common.streams import ExclusiveLock, StreamConsumer, StreamError
from services.config import Config
from services.heads.artifact import HeadsManifest, TrainedOn
from services.heads.fingerprint import ModelFingerprint
from services.heads.registry import HeadsRegistry
from services.rollout.heads_feedback import FEEDBACK_LIMITS
from services.rollout.heads_file import HEADS_FILE, read_heads, weights_checksum
from services.run_dir import RunDir
from services.watcher.drift_settings import drift_config
from services.watcher.first_version import first_version
from services.watcher.fleet import Fleet
from services.watcher.grpc_server import WatcherServicer
from services.watcher.job import JobDirectory, TrainJob
from services.watcher.job_rows import JobRows
from services.watcher.policy_source import PolicySource
from services.watcher.progress import Progress
from services.watcher.recall import recall
from services.watcher.records import FeedbackLog
from services.watcher.row_reader import RowReader
from services.watcher.rows import RowBuffer
from services.watcher.statistics_reader import StatisticsReader
from services.watcher.trainer import Trainer, TrainingFailed
from specroll.v1 import watcher_pb2_grpc
from specroll_core.drift import DriftRecord

log = logging.getLogger(__name__)

_LOCK_SECONDS = 30.0
_WAIT_SECONDS = 0.5
_WORKERS_SECONDS = 2.0
# Standard errors of a fall from which on a check leaves a doubt.
_DOUBTFUL = 2.0
# A gain, as a share of what the serving heads do, that is worth training again with more rows where it is possible.
_WORTHWHILE = 0.02
# One that few rows of later policies bring only where those before them are of another policy altogether.
_FAR = 0.05


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
        consumer = StreamConsumer(client, keys.feedback, FEEDBACK_LIMITS, name, lock=self.lock)
        self.statistics = StatisticsReader(
            consumer, self._take_record, lambda: self.metrics.count("feedback/malformed/total")
        )
        self.board = RunBoard(client, keys)
        self.registry = HeadsRegistry(run_dir.root / "heads", keep=settings.keep_versions)
        self.policies = PolicySource(config, root / "policies")
        self.buffer = RowBuffer(settings.max_rows, 2 * settings.gate_rows, settings.holdout)
        self.trainer = Trainer(root / "jobs", threads=settings.threads, nice=settings.nice)
        self.fleet = Fleet(lambda address: grpc_setup.channel(address, security=config.security))
        self.current = first_version(config, self.registry, self.policies)
        recorded = root / "feedback.jsonl"
        self.log = FeedbackLog(recorded)  # first, as it cuts off the line that a kill left unfinished
        known = recall(recorded, drift_config(config), self.current.version if self.current else 0)
        self.watch = known.watch
        self.rows = RowReader(
            RowStream(client, keys.feedback_rows, settings.max_row_bytes),
            self.buffer,
            lambda: self.metrics.count("rows/malformed/total"),
            healthy=known.healthy,
            fresh=known.fresh,
        )
        self.progress = Progress(settings.min_rows, covered=known.covered, stride=known.stride)
        self.job_rows = JobRows(settings, self.buffer, self.rows, self.progress)
        self.job_rows.needed = known.needed or settings.min_rows
        # The degradation for which the serving copies were looked at.
        self._looked_at: float | None = None
        self._waits_for = ""
        self._workers_at = 0.0
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
                self.rows.read(self.stop)  # first, for a check to know after which rows it came
                self._read_statistics()
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
            self.statistics.read(_WAIT_SECONDS)
        except StreamError as error:
            log.warning("feedback cannot be read: %s", error)
            self.stop.wait(_WAIT_SECONDS)
        except OSError:  # a full disk, say: the same record again
            self.stop.wait(_WAIT_SECONDS)
            raise

    def _take_record(self, record: DriftRecord) -> None:
        self.log.write("record", record.to_json())
        for kind, facts in self.watch.observe(record).happened:
            if kind == "check" and not facts["degraded"] and (facts["z"] or 0.0) < _DOUBTFUL:
                self.rows.without_doubt()
            elif kind == "degraded":
                self.rows.drifted()
                self.job_rows.begin_again()
            cuts = {"check": {"row": self.rows.healthy}, "degraded": {"row": self.rows.fresh}}
            self._event(kind, **facts, **cuts.get(kind, {}))

    def _look_at_policy(self) -> None:
        watch = self.watch
        if not watch.version or watch.degraded_since is not None or self.trainer.running:
            return
        rows = self.job_rows.of_later_policies()
        if watch.moved:
            watch.moved = rows > 0  # they may have been cut off since
            return
        if rows >= self.progress.stride:
            watch.policy_moved()
            newest = self.buffer.newest_policy
            self._event("moved", version=watch.version, policy=newest, rows=rows, **self._covered())

    def _tend_training(self) -> None:
        self._look_at_policy()
        if self.watch.wants_rollback:
            self._roll_back(self.watch.wants_rollback)
        self._look_at_copies()
        if self.trainer.running:
            self._take_result()
        elif self.watch.wants_training(time.time()):
            waits_for = self.job_rows.missing(moved=self._for_policy)
            if waits_for != self._waits_for and waits_for:
                log.info("training waits for %s", waits_for)
            self._waits_for = waits_for
            if not waits_for:
                self._train()

    @property
    def _for_policy(self) -> bool:
        """Whether the policy's moving is why training is wanted; a degradation goes before it."""
        return self.watch.moved and self.watch.degraded_since is None

    def _look_at_copies(self) -> None:
        """Once for every degradation: puts copies right that are not what was published. Where there are none, or none
        could be put right, training is what is left."""
        degraded, current = self.watch.degraded_since, self.current
        if degraded is None or degraded == self._looked_at or current is None:
            return
        self._looked_at = degraded
        dtype = torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32
        published = weights_checksum(read_heads(current.path / HEADS_FILE).state_dict(), dtype)
        wrong = self.fleet.disturbed(current, published)
        if not wrong:
            return
        taken = self.fleet.swap(current, wrong)
        if taken:
            self.watch.repaired()
        kind = "repaired" if taken else "repair_failed"
        self._event(kind, version=current.version, workers=len(taken), wrong=len(wrong))

    def _train(self) -> None:
        settings, config = self.config.watcher, self.config
        try:
            policy = self.policies.current()
        except (ArtifactError, OSError, ValueError) as error:
            self.watch.postponed(time.time())
            self._event("training_postponed", reason=str(error))
            return
        cold = self.current is None
        job = TrainJob(
            policy_dir=str(policy.path),
            heads_dir="" if self.current is None else str(self.current.path),
            serving=self.watch.version,
            heads=config.heads.heads,
            rank=config.heads.rank,
            epochs=settings.epochs,
            seconds=settings.train_seconds,
            nodes=settings.gate_nodes,
            sampled_children=config.rollout.engine.speculation.rule == "sampled_child",
            seed=config.run.seed,
            seen=self.job_rows.seen,
            degraded=self.watch.degraded_since,
            later=self.job_rows.of_later_policies() if self._for_policy else 0,
        )
        try:
            training, held_out = self.job_rows.choose(moved=job.later > 0)
            self.trainer.start(job, training, held_out, go_on=job.later > 0)
        except Exception as error:
            self._training_failed(f"it could not be started: {error}")
            raise
        self._event("training", rows=len(training), held_out_rows=len(held_out), policy=policy.version, cold=cold)

    def _training_failed(self, reason: str) -> None:
        self.watch.failed(time.time())
        self._event("training_failed", reason=reason)

    def _take_result(self) -> None:
        try:
            done = self.trainer.poll()
        except TrainingFailed as error:
            self._training_failed(str(error))
            return
        if done is None:
            return
        files, result = done
        try:
            self._judge(files, result)
        except Exception as error:
            self._training_failed(f"its result could not be used: {error}")
            raise
        finally:
            self.trainer.discard(files)

    def _judge(self, files: JobDirectory, result: dict[str, Any]) -> None:
        gate, job = result["gate"], result["job"]
        self._event("gate", serving=job["serving"], **gate)
        # A degradation since the job began, or its repair: the job says nothing about what is wanted now.
        overtaken = job.get("degraded") != self.watch.degraded_since
        stale = job["serving"] != self.watch.version
        if gate["passed"] and not stale:
            self._publish(files, result, overtaken=overtaken)
            return
        stale = stale or overtaken
        moved = job.get("later", 0) > 0
        undecided = gate["high"] > _WORTHWHILE * gate["old"] and not self._all_rows(result)
        if not stale:
            self.watch.refused(time.time(), undecided=undecided, moved=moved)
            self.progress.tried(result["policy_versions"][1], better=False)
            # What few rows could not yet make better goes on learning from the next ones.
            if moved and gate["high"] > 0:
                self.trainer.keep(files)
            else:
                self.trainer.keep_none()
            if undecided and not moved:
                self.job_rows.needed = 2 * _seen(result)
        self._event(
            "refused",
            difference=gate["difference"],
            low=gate["low"],
            stale=stale,
            undecided=undecided,
            moved=moved,
            needed=self.job_rows.needed,
            **self._covered(),
        )

    def _covered(self) -> dict[str, int]:
        """For a watcher that begins again after this one."""
        progress = self.progress
        return {} if progress.covered is None else {"covered": progress.covered, "stride": progress.stride}

    def _all_rows(self, result: dict[str, Any]) -> bool:
        """Whether a job had all the rows that are ever kept: another one would learn from no more."""
        return _seen(result) >= self.config.watcher.max_rows

    def _publish(self, files: JobDirectory, result: dict[str, Any], *, overtaken: bool) -> None:
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
        degraded = self.watch.degraded_since is not None
        self.watch.swapped(self.current.version)
        # Better than what served, but of rows from before the degradation: those since then are for the next training.
        degraded_meanwhile = overtaken and degraded
        later, covered = result["job"].get("later", 0), self.progress.covered
        if not degraded_meanwhile:
            if not later:
                self.job_rows.needed = 2 * _seen(result)
            elif covered is not None and gate["difference"] >= _FAR * gate["old"]:
                self.rows.moved_far(covered)
                self.job_rows.needed = 2 * later
        self.progress.tried(result["policy_versions"][1], better=True)
        self.trainer.keep_none()
        # A training for the policy's sake took the newest rows alone.
        self.watch.improving = degraded_meanwhile or later > 0 or not self._all_rows(result)
        self._event(
            "published",
            version=self.current.version,
            rows=result["rows"],
            predicted=gate["new"],
            improving=self.watch.improving,
            needed=self.job_rows.needed,
            fresh=self.rows.fresh,
            **self._covered(),
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
        self.trainer.keep_none()
        self.progress.begin_again()  # these heads have not learned from what those that are gone had
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


def _seen(result: dict[str, Any]) -> int:
    """Rows that there were for a job, those included that it left out: what there is later is counted alike."""
    return max(int(result["job"].get("seen", 0)), int(result["rows"]))
