"""How many nodes a round's requests get: what they ask for, what the configuration fixes, or what the policy chooses.

The policy chooses twice: before the trees are grown, by measured times and mean acceptance, how far they may reach, and
once they are, by what this round's candidates are worth, how much of them is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from services.config import SpeculationConfig
from services.rollout.sglang_plugin.overrides import override_of
from specroll_core.budget import BudgetPolicy
from specroll_core.tree import DraftTree


class RoundBudget:
    """One per worker: `nodes` begins a round, one of the records ends it. What pays depends on who proposes, so
    requests that ask for other parts have a policy of their own."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._policies: dict[Hashable, BudgetPolicy] = {}
        # Of the round that is on: the policy whose choice it is, if any's; whether it has the last word once the trees
        # are grown; and what it saw of them.
        self._chooser: BudgetPolicy | None = None
        self._fits = False
        self._grown: list[list[float]] | None = None

    def nodes(self, requests: Sequence, choices: Sequence[int], *, drafting: bool) -> list[int]:
        """Of each request, the root included. choices: that a policy has. drafting: somebody can be drafted for."""
        self._chooser, self._fits, self._grown = None, False, None
        if not drafting:
            return [1] * len(requests)
        asked = [override_of(request).get("nodes") for request in requests]
        chosen = 1
        if None in asked:
            chosen = self._config.nodes or self._choose(requests, requests[asked.index(None)], choices)
            if self._chooser is not None and not any(asked):
                reach = self._chooser.reach(chosen)
                self._fits, chosen = reach > chosen, reach
        return [chosen if n is None else min(n, self._config.max_nodes) for n in asked]

    @property
    def cut(self) -> Callable[[list[list[float]]], int] | None:
        """As `build_tree` takes it; None where the trees are verified as they are grown."""
        return self._fit if self._fits else None

    def record_plain(self, requests: int, seconds: float) -> None:
        """A decode step of SGLang's own has ended."""
        if self._chooser is not None:
            self._chooser.record(requests, 1, seconds)
        for policy in self._policies.values():
            if policy is not self._chooser:
                policy.times.record(requests, 1, seconds)

    def record(self, tree: DraftTree, emitted: Sequence[int], seconds: float, once: float) -> float:
        """A verification has ended. emitted: tokens of each request; once: how much of the seconds went into requests
        that had begun while nothing was kept for them. Returns how long plain rounds would have taken for as much."""
        B, nodes = tree.tokens.shape
        policy = self._chooser
        if policy is None:
            # Nobody measures plain rounds where the width is fixed: nothing is claimed to be gained.
            return seconds
        plain = sum(emitted) / B * policy.times.predict(B, 1)
        if nodes == 1:
            return plain  # nothing was found to verify: a round that is neither a plain one nor one that drafts
        policy.record(B, nodes, seconds - once, once)
        if self._grown is not None:
            policy.acceptance.observe(self._grown, emitted, nodes - 1)
        else:
            policy.acceptance.observe(tree.path_scores[:, 1:].tolist(), emitted)
        return plain

    def _choose(self, requests: Sequence, free, choices: Sequence[int]) -> int:
        """Nodes that the policy wants for the round. free: the first request that leaves it to the policy."""
        override = override_of(free)
        key = (override.get("rule"), tuple(override.get("parts") or ()))
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = BudgetPolicy(choices, peak_tokens=self._config.peak_tokens)
        self._chooser = known
        return known.choose(len(requests))

    def _fit(self, scores: list[list[float]]) -> int:
        """How many nodes the policy lets this round's trees keep, of which `scores` tells."""
        assert self._chooser is not None
        self._grown = scores
        return self._chooser.fit(len(scores), scores)
