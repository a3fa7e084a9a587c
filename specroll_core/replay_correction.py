"""Heads with the hidden-state correction, in a replay: it learns from each position as the replay passes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.corrector import Corrector
from specroll_core.head_training import HeadRows
from specroll_core.pending import PendingProposals, top_tokens
from specroll_core.proposal import PathProposer, Proposal
from specroll_core.replay_guesses import HeadGuesses, RealisedDraws, rank


class CorrectedGuesses:
    """Stands in for `HeadGuesses` in a replay that goes through the trajectories of a prompt side by side.

    corrector: with a slot for every trajectory, or every prompt where they are pooled: trajectories of one prompt then
    share what is learned. every: one start in so many is learned from, as serving,
    which advances by several tokens a round, would have it.
    """

    def __init__(
        self,
        guesses: HeadGuesses,
        rows: HeadRows,
        lm_head: Tensor,
        embedding: Tensor,
        corrector: Corrector,
        *,
        pooled: bool = False,
        every: int = 2,
    ) -> None:
        self.vocabulary = guesses.vocabulary
        self.temperature = guesses.temperature
        self.depth = guesses.depth
        self.log_p = guesses.log_p
        self._states = guesses.states
        self._width = guesses.tokens.shape[-1]
        self._rows = rows
        self._lm_head = lm_head
        self._embedding = embedding
        self._corrector = corrector
        self._pooled = pooled
        self._every = every
        first = torch.ones(len(rows), dtype=torch.bool)
        first[1:] = (rows.sequence[1:] != rows.sequence[:-1]).cpu()
        self._place = torch.arange(len(rows)) - first.nonzero().squeeze(1)[first.cumsum(0) - 1]
        slots = int(rows.sequence.max()) + 1
        self._pending = PendingProposals(slots, self.depth, corrector.memo)

    def proposal(
        self, index: Tensor, ahead: Tensor, paths: Sequence[PathProposer | None] = ()
    ) -> tuple[Proposal, RealisedDraws]:
        rows, temperature = self._rows, torch.full((len(index),), self.temperature)
        slots, place = rows.sequence[index], self._place[index]
        weights = rows.prompt[index] if self._pooled else slots
        hidden = rows.hidden[index].to(self._lm_head.dtype)
        matured = self._pending.mature(slots, place, *top_tokens(F.linear(hidden, self._lm_head), temperature))
        self._corrector.learn(weights[matured.row], matured)
        states, memo = self._corrector.correct(
            weights, self._states[index].float(), hidden, self._embedding[rows.tokens[index]]
        )
        learned = place % self._every == 0
        if bool(learned.any()):
            columns, q = top_tokens(self.vocabulary.logits(states[learned]), temperature[learned])
            self._pending.push(
                slots[learned],
                place[learned],
                memo[learned],
                temperature[learned],
                self.vocabulary.to_token(columns),
                q,
            )
        tokens, log_q, log_norm = rank(states, self.vocabulary, self.temperature, self._width)
        draws = RealisedDraws(states, log_norm, self.vocabulary, self.temperature, ahead)
        return Proposal(tokens, log_q, draws, paths), draws
