"""Replacing the heads of a running engine: staged beside the steps, copied between two of them.

SGLang runs a method of the scheduler by name between two steps (`handle_rpc_request`). The methods below are put on
the scheduler under the names in `heads_names`; what they have to say travels back with the scheduler's internal state.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from services.config import SpeculationConfig
from services.rollout.heads_file import read_checked, served_version, weights_checksum
from services.rollout.sglang_plugin import heads_names
from services.rollout.sglang_plugin.proposer import HeadProposer
from specroll_core.heads import check_state

_MARKS = "specroll_heads"

# Requests that may still get tokens: a swap notes on each of them where it fell.
_live: weakref.WeakSet = weakref.WeakSet()
# The scheduler's, once it is attached: a process runs one scheduler.
_attached: HeadsSwap | None = None


@dataclass(slots=True)
class HeadsState:
    """version, digest, checksum: of what serves; version 0 and empty strings where nothing does.

    ticket: of the last preparation; prepared: it is staged; failure: why it is not. policy_checksum, live_checksum:
    as of the last time they were computed. commit_seconds: of the last commit.
    """

    version: int = 0
    digest: str = ""
    checksum: str = ""
    ticket: str = ""
    prepared: bool = False
    failure: str = ""
    policy_checksum: str = ""
    live_checksum: str = ""
    commit_seconds: float = 0.0
    swaps: int = 0


class HeadsSwap:
    """The heads of one scheduler. worker: the `SpeculativeWorker`, whose `proposer` may be None."""

    def __init__(self, worker, config: SpeculationConfig) -> None:
        self._worker = worker
        version, digest = served_version(config.heads)
        self.state = HeadsState(version, digest)
        if worker.proposer is not None:
            self.state.checksum = weights_checksum(worker.proposer.heads.state_dict())
        self._staged: tuple[str, int, str, str, HeadProposer] | None = None  # ticket, version, digest, checksum, what

    def prepare(self, ticket: str, path: str, sha256: str, version: int, digest: str) -> None:
        """Begins to load in a thread; `state` tells when it is done. A later preparation replaces an earlier one."""
        self._staged = None
        self.state.ticket, self.state.prepared, self.state.failure = ticket, False, ""
        threading.Thread(
            target=self._stage, args=(ticket, Path(path), sha256, version, digest), name="stage-heads", daemon=True
        ).start()

    def commit(self, ticket: str) -> None:
        """Puts what is staged into service. Raises ValueError, with the old heads serving, where it is not there."""
        began = time.perf_counter()
        if self._staged is None or self._staged[0] != ticket:
            raise ValueError(f"nothing is prepared under {ticket}")
        _, version, digest, checksum, staged = self._staged
        serving = self._worker.proposer
        if serving is None:
            self._worker.proposer = staged
        else:
            # Checked when it was staged: checking again would take longer than copying.
            with torch.no_grad():
                for parameter, new in zip(serving.heads.parameters(), staged.heads.parameters(), strict=True):
                    parameter.copy_(new)
        self._staged = None
        state = self.state
        state.version, state.digest, state.checksum, state.prepared = version, digest, checksum, False
        state.swaps += 1
        for request in _live:
            getattr(request, _MARKS).append((version, len(request.output_ids)))
        self._worker.heads_changed()
        state.commit_seconds = time.perf_counter() - began

    def checksums(self) -> None:
        """Of the weights as they lie in memory now. Reads all of them."""
        proposer = self._worker.proposer
        self.state.live_checksum = "" if proposer is None else weights_checksum(proposer.heads.state_dict())
        self.state.policy_checksum = weights_checksum(dict(self._worker.model_runner.model.named_parameters()))

    def disturb(self, deviation: float, seed: int) -> None:
        """Adds noise to the output projections that serve: a fault on demand, for tests."""
        if self._worker.proposer is None:
            raise ValueError("there are no heads to disturb")
        up = self._worker.proposer.heads.up
        noise = torch.randn(up.shape, generator=torch.Generator().manual_seed(seed)) * deviation
        with torch.no_grad():
            up.add_(noise.to(up.device, up.dtype))

    def _stage(self, ticket: str, path: Path, sha256: str, version: int, digest: str) -> None:
        try:
            heads = read_checked(path, sha256)
            runner, serving = self._worker.model_runner, self._worker.proposer
            if serving is not None:
                check_state(serving.heads.spec, heads.state_dict())
            made = HeadProposer(runner.model, heads, runner.dtype, self._worker.device)
            checksum = weights_checksum(made.heads.state_dict())
        except Exception as error:  # noqa: BLE001  the edge of a thread: whatever it is, the old heads serve on
            if self.state.ticket == ticket:
                self.state.failure = f"{error}" or repr(error)
            return
        if self.state.ticket == ticket:
            self._staged = (ticket, version, digest, checksum, made)
            self.state.prepared = True


def attach(scheduler) -> None:
    """Gives a scheduler whose draft worker is ours the methods of its `HeadsSwap`."""
    global _attached
    worker = scheduler.draft_worker
    swap = _attached = HeadsSwap(worker, worker.config)
    scheduler.specroll_heads_swap = swap
    for name, method in (
        (heads_names.PREPARE, swap.prepare),
        (heads_names.COMMIT, swap.commit),
        (heads_names.CHECKSUMS, swap.checksums),
        (heads_names.DISTURB, swap.disturb),
    ):
        setattr(scheduler, name, method)


def record_of(scheduler) -> dict[str, str | int | float | bool]:
    """The fields of `HeadsState`, as plain values for SGLang's messages."""
    return asdict(scheduler.specroll_heads_swap.state)


def watch_request(request) -> None:
    """Called for every new request of the scheduler: a swap during its life will be noted on it."""
    if _attached is not None:
        setattr(request, _MARKS, [(_attached.state.version, 0)])
        _live.add(request)


def finished_spans(requests) -> dict[str, list[list[tuple[int, int]]]]:
    """(version, first token) of finished requests, for `build_additional_customized_info`."""
    return {heads_names.SPANS_KEY: [getattr(request, _MARKS, []) if request.finished() else [] for request in requests]}
