"""The proposal vocabulary of a running worker: follows the tokens that it sees and the policy's LM head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.rollout.sglang_plugin.packed_linear import lay_out, product, supported
from specroll_core.heads import ProposalVocabulary
from specroll_core.vocabulary import FrequentTokens

# Rounds between two choices of tokens: copying the rows of a few thousand takes as long as a thousandth of them.
_ROUNDS = 128


class PackedVocabulary(ProposalVocabulary):
    """Its rows laid out for the products: on a CPU in bfloat16 they take half as long."""

    def __init__(self, lm_head: Tensor, ids: Tensor) -> None:
        super().__init__(lm_head, ids)
        self._packed = lay_out(self.weight)

    def refresh(self, lm_head: Tensor) -> None:
        super().refresh(lm_head)
        self._packed = lay_out(self.weight)

    def _product(self, states: Tensor) -> Tensor:
        return product(states, self._packed)


class ServedVocabulary:
    """Give it what is sampled with `see`; `current` is what proposals of the next round are ranked over.

    The LM head's rows are copied, so `policy_changed` must be called once its values have changed.
    """

    def __init__(self, lm_head: Callable[[], Tensor], size: int, seeds: Tensor | None) -> None:
        """lm_head: returns the [V, H] weights as they are now. size: 0, or V and more, ranks over all of them.
        seeds: [n] int64, the most frequent tokens first."""
        self._lm_head = lm_head
        weight = lm_head()
        self._frequent: FrequentTokens | None = None
        if 0 < size < weight.shape[0]:
            self._frequent = FrequentTokens(weight.shape[0], size, seeds, weight.device)
        self._rounds = 0
        self._current: ProposalVocabulary | None = None
        self._unseen: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """tokens: [n], of prompts or completions; negative ones are padding."""
        if self._frequent is not None:
            self._unseen.append(tokens)

    def frequency(self, tokens: Tensor) -> Tensor:
        """tokens: [n]. Returns [n] float32, in no unit; all alike where proposals are ranked over all tokens."""
        return torch.ones(len(tokens)) if self._frequent is None else self._frequent.counts(tokens)

    def policy_changed(self) -> None:
        self._current = None

    def current(self) -> ProposalVocabulary:
        """Called once a round."""
        self._rounds += 1
        if self._current is None or self._rounds >= _ROUNDS:
            self._rounds = 0
            self._choose()
        assert self._current is not None
        return self._current

    def _choose(self) -> None:
        if self._frequent is None:
            self._current = ProposalVocabulary(self._lm_head())
            return
        if self._unseen:
            tokens = torch.cat([t.reshape(-1).to(torch.int64) for t in self._unseen])
            self._frequent.see(tokens[tokens >= 0])
            self._unseen = []
        ids = self._frequent.ids()
        if self._current is None or self._current.ids is None or not torch.equal(ids, self._current.ids):
            weight = self._lm_head()
            packs = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and supported()
            self._current = (PackedVocabulary if packs else ProposalVocabulary)(weight, ids)
