"""Contract records <-> protobuf. Behaviour log-probabilities are float32 on the wire, all other numbers are exact.

Whatever does not make a valid record raises ContractError here, so that it travels no further into the process.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from specroll.v1 import trajectory_pb2 as pb
from specroll_core.contracts import (
    ContractError,
    FinishReason,
    PromptGroup,
    RewardStatus,
    SamplingParams,
    SpecCounters,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)

_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {wire: reason for reason, wire in _FINISH_TO_PROTO.items()}
_STATUS_TO_PROTO = {
    RewardStatus.OK: pb.REWARD_STATUS_OK,
    RewardStatus.TIMEOUT: pb.REWARD_STATUS_TIMEOUT,
    RewardStatus.ERROR: pb.REWARD_STATUS_ERROR,
}
_STATUS_FROM_PROTO: dict[int, RewardStatus] = {wire: status for status, wire in _STATUS_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason) -> pb.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: int) -> FinishReason:
    """Raises ContractError where the value is unspecified or unknown to this version."""
    if value not in _FINISH_FROM_PROTO:
        raise ContractError(f"finish_reason {value} is not a known reason")
    return _FINISH_FROM_PROTO[value]


def reward_status_from_proto(value: int) -> RewardStatus:
    """Raises ContractError where the value is unspecified or unknown to this version."""
    if value not in _STATUS_FROM_PROTO:
        raise ContractError(f"reward_status {value} is not a known status")
    return _STATUS_FROM_PROTO[value]


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Raises ContractError where a number is out of the wire type's range or logit_bias names a token twice."""
    bias = dict(params.logit_bias)
    if len(bias) != len(params.logit_bias):
        raise ContractError("logit_bias names a token twice")
    with _Range("sampling parameters"):
        return pb.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_new_tokens=params.max_new_tokens,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            seed=params.seed,
            logit_bias=bias,
        )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises ContractError. The entries of logit_bias come in the order of their token ids: a map has none.

    A message whose fields were not set is not a request for defaults: proto3 reads them as 0, and top_p = 0 is refused.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_new_tokens=message.max_new_tokens,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def spans_to_proto(spans: Iterable[VersionSpan]) -> list[pb.VersionSpan]:
    with _Range("version spans"):
        return [pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]


def spans_from_proto(messages: Iterable[pb.VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(m.version, m.start, m.end) for m in messages)


def spec_to_proto(spec: SpecCounters) -> pb.SpecCounters:
    with _Range("speculation counters"):
        return pb.SpecCounters(
            verify_steps=spec.verify_steps,
            drafted=spec.drafted,
            accepted=spec.accepted,
            accepted_by_depth=spec.accepted_by_depth,
            accepted_by_source=spec.accepted_by_source,
        )


def spec_from_proto(message: pb.SpecCounters) -> SpecCounters:
    by_depth, by_source = tuple(message.accepted_by_depth), tuple(message.accepted_by_source)
    return SpecCounters(message.verify_steps, message.drafted, message.accepted, by_depth, by_source)


def prompt_group_to_proto(group: PromptGroup) -> pb.PromptGroup:
    with _Range(f"prompt group {group.group_id}"):
        return pb.PromptGroup(
            group_id=group.group_id,
            lease_id=group.lease_id,
            prompt_index=group.prompt_index,
            epoch=group.epoch,
            policy_version=group.policy_version,
            prompt_ids=group.prompt_ids,
            answer=group.answer,
            group_size=group.group_size,
            sampling=sampling_to_proto(group.sampling),
            deadline=group.deadline,
        )


def prompt_group_from_proto(message: pb.PromptGroup) -> PromptGroup:
    """Raises ContractError."""
    return PromptGroup(
        group_id=message.group_id,
        lease_id=message.lease_id,
        prompt_index=message.prompt_index,
        epoch=message.epoch,
        policy_version=message.policy_version,
        prompt_ids=tuple(message.prompt_ids),
        answer=message.answer,
        group_size=message.group_size,
        sampling=sampling_from_proto(message.sampling),
        deadline=message.deadline,
    )


def trajectory_group_to_proto(group: TrajectoryGroup) -> pb.TrajectoryGroup:
    """Prompt and worker travel once per group. Raises ContractError where siblings name different workers."""
    workers = {t.worker_id for t in group.trajectories}
    if len(workers) != 1:
        raise ContractError(f"group {group.group_id}: siblings come from several workers: {sorted(workers)}")
    with _Range(f"group {group.group_id}"):
        return pb.TrajectoryGroup(
            group_id=group.group_id,
            lease_id=group.lease_id,
            prompt_index=group.prompt_index,
            epoch=group.epoch,
            policy_version=group.policy_version,
            prompt_ids=group.trajectories[0].prompt_ids,
            worker_id=workers.pop(),
            trajectories=[_trajectory_to_proto(t) for t in group.trajectories],
            metrics=group.metrics,
        )


def trajectory_group_from_proto(message: pb.TrajectoryGroup) -> TrajectoryGroup:
    """Raises ContractError."""
    # One tuple for all siblings: the prompt is not held once per completion.
    prompt_ids = tuple(message.prompt_ids)
    return TrajectoryGroup(
        group_id=message.group_id,
        lease_id=message.lease_id,
        prompt_index=message.prompt_index,
        epoch=message.epoch,
        policy_version=message.policy_version,
        trajectories=tuple(_trajectory_from_proto(t, message, prompt_ids) for t in message.trajectories),
        metrics=dict(message.metrics),
    )


def serialize_trajectory_group(group: TrajectoryGroup) -> bytes:
    """The payload of one entry of the stream `trajectories`."""
    return trajectory_group_to_proto(group).SerializeToString()


def parse_trajectory_group(payload: bytes) -> TrajectoryGroup:
    """Raises ContractError also where the bytes are no such message."""
    try:
        message = pb.TrajectoryGroup.FromString(payload)
    except DecodeError as error:
        raise ContractError(f"{len(payload)} bytes are not a TrajectoryGroup message: {error}") from error
    return trajectory_group_from_proto(message)


def _trajectory_to_proto(t: Trajectory) -> pb.Trajectory:
    return pb.Trajectory(
        trajectory_id=t.trajectory_id,
        sample_index=t.sample_index,
        token_ids=t.token_ids,
        logprobs=t.logprobs,
        policy_version_spans=spans_to_proto(t.policy_version_spans),
        head_version_spans=spans_to_proto(t.head_version_spans),
        finish_reason=_FINISH_TO_PROTO[t.finish_reason],
        reward=t.reward,
        reward_status=_STATUS_TO_PROTO[t.reward_status],
        spec=spec_to_proto(t.spec),
        started_at=t.started_at,
        finished_at=t.finished_at,
    )


def _trajectory_from_proto(m: pb.Trajectory, group: pb.TrajectoryGroup, prompt_ids: tuple[int, ...]) -> Trajectory:
    return Trajectory(
        trajectory_id=m.trajectory_id,
        group_id=group.group_id,
        sample_index=m.sample_index,
        prompt_ids=prompt_ids,
        token_ids=tuple(m.token_ids),
        logprobs=tuple(m.logprobs),
        policy_version_spans=spans_from_proto(m.policy_version_spans),
        head_version_spans=spans_from_proto(m.head_version_spans),
        finish_reason=finish_reason_from_proto(m.finish_reason),
        reward=m.reward,
        reward_status=reward_status_from_proto(m.reward_status),
        spec=spec_from_proto(m.spec),
        worker_id=group.worker_id,
        started_at=m.started_at,
        finished_at=m.finished_at,
    )


class _Range:
    """Turns protobuf's complaint about a number that does not fit its wire type into a ContractError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError) and not isinstance(error, ContractError):
            raise ContractError(f"{self._what}: {error}") from error
