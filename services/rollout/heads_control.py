"""The heads that an engine serves, from outside its scheduler: prepare, commit, look.

Two phases. *Prepare* verifies the artifact here and has the scheduler load it beside its steps; whatever is wrong is
found there, and the old heads know nothing of it. *Commit* copies what is staged between two steps. After a call
whose outcome is not known, `state` tells what serves.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from services.common.artifacts import MANIFEST, ArtifactError
from services.heads.artifact import load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.rollout.completion import EngineError
from services.rollout.heads_file import HEADS_FILE, HEADS_SETTING, load_heads
from services.rollout.policy_check import PolicyShape
from services.rollout.sglang_plugin import heads_names

if TYPE_CHECKING:
    from services.rollout.engine import RolloutEngine

log = logging.getLogger(__name__)

# The scheduler answers between two steps; one that takes this long has lost its way.
_CALL_SECONDS = 60.0
_STAGE_SECONDS = 120.0
_POLLS = (0.01, 0.02, 0.05, 0.1, 0.25)


class HeadsRefused(ValueError):
    """Heads that are not put into service; one sentence with the reason. kind: a word for a metric."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ServedHeads:
    """version 0 is none. checksum: SHA-256 of the weights in the serving type, when they were put into service."""

    version: int
    digest: str
    checksum: str
    commit_seconds: float = 0.0
    swaps: int = 0


class HeadsControl:
    """One per engine; calls take turns."""

    def __init__(self, engine: RolloutEngine, socket: Any) -> None:
        self._engine = engine
        self._socket = socket
        self._lock = asyncio.Lock()
        self._wire = asyncio.Lock()
        self._prepared: tuple[str, int, str] | None = None  # ticket, version, digest
        self.refused: Counter[str] = Counter()
        # As of the last look.
        self.version = 0
        self.swaps = 0

    async def state(self) -> ServedHeads:
        """What serves now."""
        record = await self._record()
        fields = ("version", "digest", "checksum", "commit_seconds", "swaps")
        served = ServedHeads(**{name: record[name] for name in fields})
        self.version, self.swaps = served.version, served.swaps
        return served

    async def prepare(self, directory: Path, version: int, digest: str) -> None:
        """Loads, checks and stages an artifact. Raises HeadsRefused, with nothing changed."""
        async with self._lock:
            self._prepared = None
            try:
                file, sha256 = await asyncio.to_thread(self._verify, directory, version, digest)
                ticket = uuid.uuid4().hex
                await self._call(
                    heads_names.PREPARE, ticket=ticket, path=str(file), sha256=sha256, version=version, digest=digest
                )
                await self._until_staged(ticket)
            except HeadsRefused as refusal:
                self.refused[refusal.kind] += 1
                log.error("heads version %d are refused and the old ones serve on: %s", version, refusal)
                raise
            self._prepared = ticket, version, digest

    async def commit(self, version: int, digest: str) -> ServedHeads:
        """Puts what `prepare` staged into service. Raises HeadsRefused where that is something else."""
        async with self._lock:
            if self._prepared is None or self._prepared[1:] != (version, digest):
                self.refused["not_prepared"] += 1
                raise HeadsRefused("not_prepared", f"heads version {version} are not prepared; prepare them again")
            ticket, self._prepared = self._prepared[0], None
            try:
                await self._call(heads_names.COMMIT, ticket=ticket)
            except HeadsRefused:
                self.refused["engine"] += 1
                raise
            served = await self.state()
            if (served.version, served.digest) != (version, digest):
                self.refused["engine"] += 1
                raise HeadsRefused("engine", f"heads version {served.version} serve after a commit of {version}")
        log.info("serving heads version %d (no step for %.1f ms)", version, 1000 * served.commit_seconds)
        return served

    async def checksums(self) -> tuple[str, str]:
        """SHA-256 of the heads and of the policy as they lie in memory now; the engine takes no step meanwhile."""
        await self._call(heads_names.CHECKSUMS)
        record = await self._record()
        return record["live_checksum"], record["policy_checksum"]

    async def disturb(self, deviation: float, seed: int) -> None:
        """Noise on the heads that serve. For tests."""
        await self._call(heads_names.DISTURB, deviation=deviation, seed=seed)
        log.warning("the heads that serve were disturbed with noise of standard deviation %g", deviation)

    def _verify(self, directory: Path, version: int, digest: str) -> tuple[Path, str]:
        try:
            # Training moves the LM head: heads of a later policy must not be refused by an earlier one.
            model = ModelFingerprint.of(self._engine.model_dir)
            loaded = load_artifact(directory, model, lm_head_may_differ=True)
        except (ArtifactError, ValueError) as error:
            raise HeadsRefused("artifact", str(error)) from error
        artifact = loaded.artifact
        if (artifact.version, artifact.digest) != (version, digest):
            raise HeadsRefused("artifact", f"{directory} holds version {artifact.version}, digest {artifact.digest}")
        return artifact.path / HEADS_FILE, artifact.files[HEADS_FILE].sha256

    async def _until_staged(self, ticket: str) -> None:
        waited, poll = 0.0, 0
        while True:
            record = await self._record()
            if record["ticket"] != ticket or record["failure"]:
                raise HeadsRefused("engine", record["failure"] or "another preparation came in between")
            if record["prepared"]:
                return
            if waited >= _STAGE_SECONDS:
                raise HeadsRefused("engine", f"the engine did not load the heads within {_STAGE_SECONDS:.0f} s")
            pause = _POLLS[min(poll, len(_POLLS) - 1)]
            await asyncio.sleep(pause)
            waited, poll = waited + pause, poll + 1

    async def _record(self) -> dict[str, Any]:
        return (await self._engine.internal_state()).get(heads_names.STATE_KEY) or {}

    async def _call(self, method: str, **parameters: Any) -> None:
        await self._engine.status()  # raises where the engine is dead
        async with self._wire:
            success, message = await self._engine.or_failure(
                asyncio.to_thread(_exchange, self._socket, method, parameters)
            )
        if not success:
            raise HeadsRefused("engine", message)


def check_start_heads(
    path: Path, model: PolicyShape, model_dir: Path, policy_version: int, setting: str = HEADS_SETTING
) -> None:
    """Raises ValueError where heads that an engine is to start with do not fit its model. setting: as `load_heads`."""
    if path.is_dir() or path.with_name(MANIFEST).is_file():  # with a manifest: more can be compared than shapes
        directory = path if path.is_dir() else path.parent
        artifact = load_artifact(directory, ModelFingerprint.of(model_dir), lm_head_may_differ=policy_version > 0)
        if not path.is_dir() and path.name not in artifact.artifact.files:
            raise ValueError(f"{path} is not a file that the {MANIFEST} beside it lists.")
    spec = load_heads(path, setting).spec
    ours, theirs = (spec.hidden, spec.vocab), (model.config["hidden_size"], model.vocab_size)
    if ours != theirs:
        raise ValueError(f"{setting} {path} fits a hidden size and vocabulary of {ours}, but the model has {theirs}.")


def _exchange(socket: Any, method: str, parameters: dict[str, Any]) -> tuple[bool, str]:
    """What `Engine.collective_rpc` does, with a deadline. Raises EngineError after it."""
    from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

    while socket.poll(0):
        socket.recv()  # an answer that came after its deadline
    sock_send(socket, RpcReqInput(method=method, parameters=parameters))
    if not socket.poll(int(_CALL_SECONDS * 1000), zmq.POLLIN):
        raise EngineError(f"the scheduler did not answer {method} within {_CALL_SECONDS:.0f} s")
    answer = sock_recv(socket)
    return answer.success, answer.message
