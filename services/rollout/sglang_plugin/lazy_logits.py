"""Logits of visited nodes only: the LM head is a fifth of a small model's work, and most nodes are never visited.

For one request the LM head's weights are read once either way, so computing all nodes at once is cheaper; for many
the rows count. Which it is, the caller says before each forward.
"""

from __future__ import annotations

from torch import Tensor


class LazyLogits:
    """Takes the place of the LM head's product in a model's `LogitsProcessor` where it is asked to."""

    def __init__(self, processor) -> None:
        """processor: SGLang's `LogitsProcessor` of the model."""
        self._compute = processor._get_logits
        self._deferred: tuple | None = None
        self._wanted = False
        processor._get_logits = self._get_logits

    def defer(self) -> None:
        """The next forward gives hidden states in place of logits."""
        self._wanted = True

    def rows(self, hidden: Tensor) -> Tensor:
        """hidden: [n, H], rows of what the deferred forward gave. Returns their logits [n, V]."""
        assert self._deferred is not None
        lm_head, metadata = self._deferred
        return self._compute(hidden, lm_head, metadata)

    def _get_logits(self, hidden_states, lm_head, logits_metadata, *args, **kwargs):
        if not self._wanted:
            return self._compute(hidden_states, lm_head, logits_metadata, *args, **kwargs)
        self._wanted = False
        self._deferred = lm_head, logits_metadata
        return hidden_states
