"""RolloutService: generation for clients, evaluation groups, policy updates."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator

import grpc

from services.common.artifacts import ArtifactError
from services.common.wire import (
    finish_reason_to_proto,
    prompt_group_from_proto,
    sampling_from_proto,
    spans_to_proto,
    spec_to_proto,
    trajectory_group_to_proto,
)
from services.rollout.completion import PolicyUpdateError, SpeculationStats
from services.rollout.engine import RolloutEngine
from services.rollout.group_runner import GroupRunner
from services.rollout.heads_control import HeadsRefused
from services.rollout.heads_service import CannotRead, WorkerHeads
from services.rollout.policy import PauseMode, Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from services.rollout.prompt_loop import PromptLoop
from specroll.v1 import rollout_pb2, rollout_pb2_grpc

log = logging.getLogger(__name__)

_PAUSE_MODES: dict[int, PauseMode] = {
    rollout_pb2.PauseMode.PAUSE_MODE_RETRACT: "retract",
    rollout_pb2.PauseMode.PAUSE_MODE_IN_PLACE: "in_place",
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Runs on the worker's event loop, beside the prompt loop, on the same engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        runner: GroupRunner,
        policy: ServedPolicy,
        store: PolicyStore,
        loop: PromptLoop,
        heads: WorkerHeads,
        *,
        worker_id: str,
        chaos: bool = False,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._policy = policy
        self._store = store
        self._loop = loop
        self._heads = heads
        self._worker_id = worker_id
        self._chaos = chaos

    async def Generate(self, request, context) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        request_id = request.request_id or f"generate-{secrets.token_hex(8)}"
        try:
            sampling = sampling_from_proto(request.sampling)
            async for delta in self._engine.stream(tuple(request.prompt_ids), sampling, request_id=request_id):
                response = rollout_pb2.GenerateResponse(token_ids=delta.token_ids, logprobs=delta.logprobs)
                if delta.completion is not None:
                    response.finish_reason = finish_reason_to_proto(delta.completion.finish_reason)
                    response.policy_version_spans.extend(spans_to_proto(delta.completion.policy_version_spans))
                    response.head_version_spans.extend(spans_to_proto(delta.completion.head_version_spans))
                    response.spec.CopyFrom(spec_to_proto(delta.completion.spec))
                yield response
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            await self._engine.abort(request_id)  # the client went away
            raise

    async def SampleGroup(self, request, context):
        try:
            group = await self._runner.run(prompt_group_from_proto(request))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ExceptionGroup as failed:
            cause = failed.exceptions[0]
            code = grpc.StatusCode.INVALID_ARGUMENT if isinstance(cause, ValueError) else grpc.StatusCode.INTERNAL
            await context.abort(code, str(cause))
        return trajectory_group_to_proto(group)

    async def UpdatePolicy(self, request_iterator, context):
        header = (await anext(aiter(request_iterator), rollout_pb2.UpdatePolicyRequest())).header
        ref = header.policy
        if not ref.digest:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a header with a policy")
        served = Served(ref.version, ref.digest)
        try:
            if ref.path:
                found = await asyncio.to_thread(self._store.at_path, ref)
                if found is None:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{ref.path} cannot be read here")
                    raise AssertionError("abort raises")
                model_dir = found
            else:
                chunks = (message.chunk async for message in request_iterator)
                model_dir = await self._store.from_async_chunks(ref, chunks)
            report = await self._policy.load(model_dir, served, pause_mode=_PAUSE_MODES.get(header.pause_mode))
        except (ArtifactError, PolicyUpdateError, ValueError) as error:
            log.error(
                "policy version %d is refused, version %d goes on: %s", ref.version, self._policy.served.version, error
            )
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        return rollout_pb2.UpdatePolicyResponse(
            policy_version=served.version, pause_seconds=report.pause_seconds, in_flight=report.in_flight
        )

    async def SwapHeads(self, request_iterator, context):
        header = (await anext(aiter(request_iterator), rollout_pb2.SwapHeadsRequest())).header
        if not header.heads.digest:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a header with heads")
        try:
            served = await self._heads.swap(header, (message.chunk async for message in request_iterator))
        except CannotRead as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except HeadsRefused as error:
            missing = error.kind in ("not_prepared", "off")
            code = grpc.StatusCode.FAILED_PRECONDITION if missing else grpc.StatusCode.DATA_LOSS
            await context.abort(code, str(error))
        except ArtifactError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        return rollout_pb2.SwapHeadsResponse(
            heads_version=served.version, heads_checksum=served.checksum, commit_seconds=served.commit_seconds
        )

    async def DisturbHeads(self, request, context):
        if not self._chaos:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "rollout.chaos is not set on this worker")
        try:
            await self._heads.disturb(request.deviation, request.seed)
        except HeadsRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return rollout_pb2.DisturbHeadsResponse()

    async def GetStatus(self, request, context):
        status = await self._engine.status()
        heads = await self._heads.served()
        stats = await self._engine.speculation_stats()
        live, policy_checksum = await self._heads.checksums() if request.checksums else (heads.checksum, "")
        return rollout_pb2.RolloutStatus(
            worker_id=self._worker_id,
            policy_version=self._policy.served.version,
            heads_version=heads.version,
            heads_checksum=live,
            heads_digest=heads.digest,
            policy_checksum=policy_checksum,
            running=status.running,
            groups_in_flight=self._loop.in_flight,
            tokens_total=status.tokens_total,
            ready=True,
            speculation=None if stats is None else _totals(stats),
        )


def _totals(stats: SpeculationStats) -> rollout_pb2.SpeculationTotals:
    return rollout_pb2.SpeculationTotals(
        rounds=stats.rounds,
        plain_rounds=stats.plain_rounds,
        requests=stats.requests,
        drafted=stats.drafted,
        emitted=stats.emitted,
        seconds=stats.seconds,
        plain_seconds=stats.plain_seconds,
    )
