"""The heads of a worker: which it starts with, and how calls change them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc

from services.common import grpc_setup
from services.common.artifacts import ArtifactError, open_artifact
from services.common.run_board import CurrentHeads, RunBoard
from services.config import Config, EngineConfig
from services.heads.artifact import artifact_directory, load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.rollout.heads_control import HeadsControl, HeadsRefused, ServedHeads
from services.rollout.policy_store import PolicyStore
from specroll.v1 import artifact_pb2, rollout_pb2, watcher_pb2, watcher_pb2_grpc

log = logging.getLogger(__name__)

_FETCH_SECONDS = 120.0
# Between two announcements: a line lives for four of them.
ANNOUNCE_SECONDS = 5.0


class CannotRead(ValueError):
    """The path that a call names is not on this machine: the files must be sent."""


def engine_with_heads(config: Config, board: RunBoard, store: PolicyStore, model_dir: Path) -> EngineConfig:
    """The engine's configuration with the heads that the run serves now, so that a worker that comes late brings them
    from its first step; without a watcher those that the configuration names.

    Heads that cannot be had or do not fit are left out with a warning: the watcher will send them again.
    """
    engine = config.rollout.engine
    if not engine.speculation.enabled:
        return engine
    path = config.initial_heads
    current = board.heads()
    if current is not None and current.version > 0:
        try:
            path = _bring(config, store, current)
            load_artifact(path, ModelFingerprint.of(model_dir), lm_head_may_differ=True)
        except (ArtifactError, ValueError, grpc.RpcError) as error:
            log.warning("heads version %d cannot be served from the start: %s", current.version, error)
            path = None
    if path is not None:
        path = artifact_directory(path)
    speculation = engine.speculation.model_copy(update={"heads": path})
    return engine.model_copy(update={"speculation": speculation})


def _bring(config: Config, store: PolicyStore, current: CurrentHeads) -> Path:
    ref = artifact_pb2.ArtifactRef(version=current.version, path=current.path, digest=current.digest)
    found = store.at_path(ref)
    if found is not None:
        return found
    with grpc_setup.channel(current.watcher, security=config.security) as channel:
        chunks = watcher_pb2_grpc.WatcherServiceStub(channel).FetchHeads(
            watcher_pb2.FetchHeadsRequest(version=current.version), timeout=_FETCH_SECONDS
        )
        return store.from_chunks(ref, chunks)


class WorkerHeads:
    """What the service's calls do with an engine's heads."""

    def __init__(self, control: HeadsControl, store: PolicyStore, *, speculation: bool) -> None:
        self._control = control
        self._store = store
        self._speculation = speculation
        self.swaps_failed = 0

    async def swap(
        self, header: rollout_pb2.SwapHeadsHeader, chunks: AsyncIterator[artifact_pb2.ArtifactChunk]
    ) -> ServedHeads:
        """Prepares, commits, or both. Raises HeadsRefused or ArtifactError with the old heads serving, and CannotRead.

        The result's commit_seconds are 0 where nothing was committed.
        """
        if not self._speculation:
            raise HeadsRefused("off", "rollout.engine.speculation.enabled is not set on this worker")
        ref, phase = header.heads, header.phase
        try:
            if phase != rollout_pb2.SwapPhase.SWAP_PHASE_COMMIT:
                await self._control.prepare(await self._directory(ref, chunks), ref.version, ref.digest)
            if phase != rollout_pb2.SwapPhase.SWAP_PHASE_PREPARE:
                return await self._control.commit(ref.version, ref.digest)
        except (HeadsRefused, ArtifactError):
            self.swaps_failed += 1
            raise
        return replace(await self._control.state(), commit_seconds=0.0)

    async def served(self) -> ServedHeads:
        if not self._speculation:
            return ServedHeads(0, "", "")
        return await self._control.state()

    async def checksums(self) -> tuple[str, str]:
        """Of heads and policy, as they lie in memory; empty strings where speculation is off."""
        return await self._control.checksums() if self._speculation else ("", "")

    async def disturb(self, deviation: float, seed: int) -> None:
        await self._control.disturb(deviation, seed)

    async def _directory(
        self, ref: artifact_pb2.ArtifactRef, chunks: AsyncIterator[artifact_pb2.ArtifactChunk]
    ) -> Path:
        if not ref.path:
            return await self._store.from_async_chunks(ref, chunks)
        found = await asyncio.to_thread(self._store.at_path, ref)
        if found is None:
            if self._is_here(ref.path):
                # It is here, and is not what was announced: sending the files would not mend it.
                self._control.refused["artifact"] += 1
                reason = await asyncio.to_thread(_what_is_wrong, ref)
                log.error("heads version %d are refused and the old ones serve on: %s", ref.version, reason)
                raise HeadsRefused("artifact", reason)
            raise CannotRead(f"{ref.path} cannot be read here")
        return found

    @staticmethod
    def _is_here(path: str) -> bool:
        return Path(path).is_dir()


def _what_is_wrong(ref: artifact_pb2.ArtifactRef) -> str:
    try:
        found = open_artifact(Path(ref.path))
    except ArtifactError as error:
        return str(error)
    return f"{found.path} has the digest {found.digest}, and {ref.digest} was announced"


async def announce_for_ever(board: RunBoard, worker_id: str, address: str) -> None:
    """Keeps the worker's line on the board; runs until it is cancelled."""
    while True:
        try:
            await asyncio.to_thread(board.announce, worker_id, address)
        except RuntimeError as error:
            log.debug("the worker could not be announced: %s", error)
        await asyncio.sleep(ANNOUNCE_SECONDS)
