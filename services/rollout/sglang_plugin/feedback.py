"""Training rows for heads, handed from the scheduler to the rollout process without ever waiting.

A fraction of the requests is followed: after each round their tokens and the states before them are copied, and once
enough are together, or the request ends, they leave as one frame through a ZeroMQ socket with a high-water mark. A
full socket drops the frame and counts it. Requests that are not followed cost one dictionary look-up a round.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from services.common.row_frames import RowFrame, prompt_name
from services.rollout.sglang_plugin.variables import FEEDBACK_VARIABLE

STATE_KEY = "specroll_feedback"
_FOLLOWED = "specroll_followed"
_MAX_FRAME_BYTES = 512 * 1024
_LONGEST_FRAME = 512


@dataclass(slots=True)
class _Open:
    """Rows of one request that have not left yet. next: position after the last of them."""

    request: Any
    policy: str
    next: int
    tokens: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    rows: int = 0


class Allowance:
    """A token bucket: `rate` a second on average, twenty seconds' worth at once. A faster machine does not need more
    rows than a slow one, and they cost more there."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._level = self._most = 20 * rate
        self._at = clock()

    def left(self) -> bool:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level > 0

    def take(self, amount: int) -> None:
        """May go below zero: what was begun is finished, and paid for later."""
        self._level -= amount


class RowSender:
    """One per scheduler. address: of the rollout process's socket; fraction: of requests that are followed, as long as
    they bring no more than `rate` rows a second; queue: frames that may wait for the other end."""

    def __init__(self, address: str, fraction: float, queue: int, rate: float) -> None:
        self._allowance = Allowance(rate)
        self._threshold = int(fraction * 2**32)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._open: dict[str, _Open] = {}
        self.sent = self.dropped = self.rows = 0

    def record(self) -> dict[str, int]:
        return {"sent": self.sent, "dropped": self.dropped, "rows": self.rows}

    def note_round(self, batch, emitted: Tensor, kept: Sequence[int], states: Callable[[int], Tensor], slots) -> None:
        """After a round and before its states are stored.

        emitted: [B, L], of which request b emits the first kept[b]; states: [at least kept[b], H] for b, those that
        they were sampled from; slots: the `RequestSlots`, which hold the pending tokens and the states before them.
        """
        followed = [row for row, request in enumerate(batch.reqs) if self._is_followed(request)]
        if not followed:
            return
        policy = _policy()
        for row in followed:
            request, count = batch.reqs[row], kept[row]
            start = len(request.output_ids)
            rows = self._open.get(request.rid)
            if rows is not None and (rows.next != start or rows.policy != policy):
                self._send(self._open.pop(request.rid))
                rows = None
            if rows is None:
                # Where rows begin, the pending token is the first of them.
                rows = self._open[request.rid] = _Open(request, policy, start)
                at = batch.req_pool_indices[row : row + 1].to(torch.int64)
                self._append(rows, slots.pending[at], slots.hidden[at])
            self._append(rows, emitted[row, :count], states(row)[:count])
            rows.next = start + count
            if rows.rows >= self._longest(slots.hidden.shape[1]):
                self._send(self._open.pop(request.rid))

    def finish(self, requests) -> None:
        """Lets the rows of finished requests go."""
        if not self._open:
            return
        for request in requests:
            if request.finished() and (rows := self._open.pop(request.rid, None)) is not None:
                self._send(rows)

    def _is_followed(self, request) -> bool:
        known = getattr(request, _FOLLOWED, None)
        if known is None:
            params = request.sampling_params
            # Penalties and a bias make another law than the LM head's.
            plain = (
                params.frequency_penalty == 0
                and params.presence_penalty == 0
                and params.repetition_penalty == 1
                and not params.logit_bias
            )
            known = plain and int(request.rid[:8], 16) < self._threshold and self._allowance.left()
            setattr(request, _FOLLOWED, known)
        return known

    def _append(self, rows: _Open, tokens: Tensor, hidden: Tensor) -> None:
        rows.tokens.append(tokens)
        rows.hidden.append(hidden.to(torch.bfloat16))
        rows.rows += len(tokens)
        self._allowance.take(len(tokens))

    @staticmethod
    def _longest(hidden_size: int) -> int:
        return max(2, min(_LONGEST_FRAME, _MAX_FRAME_BYTES // (2 * hidden_size)))

    def _send(self, rows: _Open) -> None:
        if rows.rows < 2:
            return
        params = rows.request.sampling_params
        frame = RowFrame(
            prompt=prompt_name(rows.request.origin_input_ids),
            policy=int(rows.policy.split(":")[0]),
            temperature=params.temperature if params.top_k > 1 else 0.0,
            top_p=params.top_p,
            top_k=-1 if params.top_k >= 1 << 30 else params.top_k,
            min_p=params.min_p,
            tokens=torch.cat(rows.tokens).cpu(),
            hidden=torch.cat(rows.hidden).cpu(),
        )
        try:
            self._socket.send(frame.to_bytes(), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1
            return
        self.sent += 1
        self.rows += rows.rows


@functools.cache
def _sender() -> RowSender | None:
    """The scheduler's, made at first use; None where nobody asked for rows."""
    text = os.environ.get(FEEDBACK_VARIABLE)
    return RowSender(**json.loads(text)) if text else None


def note_round(batch, emitted: Tensor, kept: Sequence[int], states: Callable[[int], Tensor], slots) -> None:
    """`RowSender.note_round` of the process's sender, if it has one."""
    if (sender := _sender()) is not None:
        sender.note_round(batch, emitted, kept, states, slots)


def finish(requests) -> None:
    """`RowSender.finish` of the process's sender, if it has one."""
    if (sender := _sender()) is not None:
        sender.finish(requests)


def record() -> dict[str, int]:
    """Frames sent and dropped and rows sent, for SGLang's messages; empty where no rows are wanted."""
    sender = _sender()
    return {} if sender is None else sender.record()


def _policy() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)
