"""Whitened directions of a running worker: made beside the steps, taken in between two of them.

They belong to one LM head and one proposal vocabulary. A thread of low priority makes them anew once the policy has
changed, or a twentieth of the vocabulary has no direction; until then the old ones serve, which are nearly right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from specroll_core.correction import CorrectionOptions, Features
from specroll_core.heads import ProposalVocabulary
from specroll_core.whitening import Directions, whitened_rows

log = logging.getLogger(__name__)

# States that features are made of: enough for the covariance's first directions, and half a megabyte of a small model.
_STATES = 512
# Tokens that have a direction where proposals are ranked over all of them: the first ids, which are the frequent ones
# of a byte-pair vocabulary.
_MOST_TOKENS = 8192
_KNOWN = 0.95
# Below the engine's own threads.
_NICE = 10


@dataclass(frozen=True)
class _Job:
    rows: Tensor
    frequency: Tensor
    ids: Tensor
    vocab: int
    states: tuple[Tensor, Tensor] | None
    stream: torch.cuda.Stream | None


class DirectionsMaker:
    """Call `see` and `current` once a round, `policy_changed` after an update. Features are made once: weights that
    were learned would mean something else with others."""

    def __init__(self, hidden_size: int, device: torch.device | str, options: CorrectionOptions | None = None) -> None:
        self._options = options or CorrectionOptions()
        self._device = torch.device(device)
        self._hidden = torch.zeros(_STATES, hidden_size, device=device)
        self._embedded = torch.zeros(_STATES, hidden_size, device=device)
        self._states = 0
        self._made: tuple[Directions, Features] | None = None
        self._looked_at: ProposalVocabulary | None = None
        self._wanted = True
        self._thread: threading.Thread | None = None
        self._finished: tuple[Directions, Features] | None = None

    def see(self, hidden: Tensor, embedded: Tensor) -> None:
        """hidden, embedded: [B, H], states and the embeddings of the tokens drawn from them."""
        if self._states < _STATES:
            some = min(len(hidden), _STATES - self._states)
            places = slice(self._states, self._states + some)
            self._hidden[places], self._embedded[places] = hidden[:some].float(), embedded[:some].float()
            self._states += some

    def policy_changed(self) -> None:
        """The LM head has new values."""
        self._wanted = True

    def current(self, columns: ProposalVocabulary, served: ServedVocabulary) -> tuple[Directions, Features] | None:
        """What is ready, None before anything is. columns: what proposals of this round are ranked over."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._finished is not None:
                self._made, self._finished = self._finished, None
                self._looked_at = None
                if self._device.type == "cuda":
                    # They were made in another stream, whose allocator may take them back once they are replaced.
                    for made in (self._made[0].rows, self._made[0].inverse):
                        made.record_stream(torch.cuda.current_stream())
        if self._looked_at is not columns:
            self._looked_at = columns
            ids = self._ids(columns)
            self._wanted |= self._made is None or self._made[0].known(ids) < _KNOWN
        if self._wanted and self._thread is None and self._states == _STATES:
            self._wanted = False
            self._start(columns, served)
        return self._made

    def wait(self) -> None:
        """Until nothing is being made, for tests."""
        if self._thread is not None:
            self._thread.join()

    def _ids(self, columns: ProposalVocabulary) -> Tensor:
        if columns.ids is not None:
            return columns.ids
        return torch.arange(min(columns.size, _MOST_TOKENS), device=self._device)

    def _start(self, columns: ProposalVocabulary, served: ServedVocabulary) -> None:
        ids = self._ids(columns)
        # Copied here: a policy update may write the LM head while the thread reads.
        rows = columns.weight if columns.ids is not None else columns.weight[: len(ids)].clone()
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        states = None if self._made is not None else (self._hidden, self._embedded)
        job = _Job(rows, served.frequency(ids), ids, columns.size, states, stream)
        self._thread = threading.Thread(target=self._make, args=(job,), name="whiten-rows", daemon=True)
        self._thread.start()

    def _make(self, job: _Job) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            with torch.cuda.stream(job.stream) if job.stream is not None else contextlib.nullcontext():
                rows = whitened_rows(job.rows, job.frequency.to(job.rows.device), self._options.whitening)
                directions = Directions.of(rows, job.ids, job.vocab)
                if job.states is None:
                    assert self._made is not None
                    features = self._made[1]
                else:
                    features = Features(*job.states, components=self._options.components)
            if job.stream is not None:
                job.stream.synchronize()
            self._finished = directions, features
        except Exception:
            # The edge of a thread: serving goes on with what there is, and the next policy tries again.
            log.exception("Whitened directions could not be made; corrections go on with those before, if any.")
