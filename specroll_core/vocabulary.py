"""Which tokens proposals are ranked over: those that rollouts use, newer ones counting more.

The LM head's product over a whole vocabulary costs more than everything else that proposing does, and a model's
rollouts use a few thousand tokens. What is left out is never proposed, but sampled as often as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Counts halve after this many tokens, so that the choice follows what is being generated.
_HALF_LIFE_TOKENS = 1 << 16


class FrequentTokens:
    """Counts tokens and names the `size` most frequent ones.

    Before anything is counted the seeds come first, in their order, then low ids: byte-pair vocabularies number
    frequent tokens first.
    """

    def __init__(self, vocab: int, size: int, seeds: Tensor | None = None, device: torch.device | str = "cpu") -> None:
        """size: at most vocab. seeds: [n] int64 ids, the most frequent first."""
        assert 1 <= size <= vocab
        self.size = size
        # Priors stay below one count: one occurrence outweighs them.
        self._counts = torch.linspace(0.1, 0.0, vocab, device=device)
        if seeds is not None:
            self._counts[seeds.to(device)] = torch.linspace(0.9, 0.2, len(seeds), device=device)
        self._seen = 0

    def see(self, tokens: Tensor) -> None:
        """tokens: [n] int64 of prompts or completions."""
        self._counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=self._counts.dtype))
        self._seen += tokens.numel()
        if self._seen >= _HALF_LIFE_TOKENS:
            self._counts *= 0.5
            self._seen = 0

    def counts(self, tokens: Tensor) -> Tensor:
        """[n] float32, above 0: how often each of some tokens [n] was seen, newer occurrences counting more."""
        return self._counts[tokens] + 1e-3

    def ids(self) -> Tensor:
        """[size] int64, ascending."""
        return self._counts.topk(self.size).indices.sort().values
