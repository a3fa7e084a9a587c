"""What is proposed in one round: heads, the correction of their states, and memory, each where a request asks for it.

Beside the batch, at times one request's proposal is made once more with a part switched the other way, for the part's
gate (`part_gates.py`). It shares the batch's products and is never verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.config import SpeculationConfig
from services.rollout.sglang_plugin.compiled_parts import CompiledParts
from services.rollout.sglang_plugin.correction_slots import CorrectionSlots, Proposed
from services.rollout.sglang_plugin.overrides import override_of
from services.rollout.sglang_plugin.part_gates import PartGates
from services.rollout.sglang_plugin.proposer import HeadProposer
from services.rollout.sglang_plugin.reflex_slots import MEMORY, ReflexSlots
from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from specroll_core.counterfactual import proposal_of, shape_of
from specroll_core.gate import GateOptions, TreeTrace
from specroll_core.growth import TreeOptions
from specroll_core.law import LawParams
from specroll_core.pending import TOP
from specroll_core.proposal import DepthLaws, Proposal, propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.seen_laws import SeenLaws
from specroll_core.tree import DraftTree, build_tree, plain_tree
from specroll_core.verified import NodeLogits, Verified

TREE = TreeOptions()
# The name of a gate; requests may share what is corrected or not.
CORRECTION = "correction"


@dataclass(frozen=True)
class RoundBatch:
    """A batch of B requests. rows: theirs in SGLang's pool; pending: [B] int64; hidden: [B, H], the states before;
    lengths: [B], the pending tokens' positions; budgets: nodes of each; nodes: of the widest; cut: as `build_tree`
    takes it."""

    requests: Sequence
    rows: list[int]
    pending: Tensor
    hidden: Tensor
    lengths: Tensor
    params: LawParams
    budgets: Sequence[int]
    nodes: int
    cut: Callable[[list[list[float]]], int] | None = None


@dataclass(frozen=True)
class _Shadow:
    """A proposal for request `row` with the correction switched the other way. compared: its tree is to be."""

    row: int
    proposal: Proposal
    compared: bool


class RoundProposals:
    """One per worker. `tree` proposes, `watch` stands before the walk's logits, `learn` follows the walk."""

    def __init__(
        self,
        config: SpeculationConfig,
        scorer: CountTableScorer,
        vocabulary: ServedVocabulary,
        reflex: ReflexSlots,
        correction: CorrectionSlots,
        compiled: CompiledParts | None = None,
    ) -> None:
        compiled = compiled or CompiledParts()
        self._build = build_tree if compiled.growth is None else compiled.growth.build_tree
        self._candidates = propose_from_logits if compiled.candidates is None else compiled.candidates.propose
        self._rule = config.rule
        self._scorer = scorer
        self._vocabulary = vocabulary
        self._reflex = reflex
        self._correction = correction
        gated = [MEMORY] if config.memory != "off" else []
        gated += [CORRECTION] if config.correction != "off" else []
        self.gates = PartGates(gated if config.gate else (), TREE.max_depth, GateOptions())
        # Of the round that is on.
        self._corrected: Proposed | None = None
        self._seen: SeenLaws | None = None
        # While its gate is off, one request at a time goes on learning, to be compared.
        self._scout = ""

    def tree(
        self, this: RoundBatch, heads: HeadProposer | None, uniforms: Tensor
    ) -> tuple[DraftTree, DepthLaws | None]:
        """heads: None where no request of the batch asks for them. uniforms: [B, nodes] float64, for sampled children.
        Returns the trees and the laws that they were drawn from."""
        self._corrected = self._seen = None
        if this.nodes == 1:
            return plain_tree(this.pending.tolist(), this.pending.device), None
        matched = [self._by_target_match(request) for request in this.requests]
        options = replace(TREE, sampled_children=not all(matched))
        paths = self._reflex.proposers(this.requests, this.rows)
        used, shadow = paths, None
        if heads is None:
            proposal = Proposal.of_paths(paths, this.pending.device)
        else:
            if not self.gates.is_on(MEMORY):
                used = [None if _follows(r) else path for r, path in zip(this.requests, paths, strict=True)]
            proposal, shadow = self._from_heads(this, heads, options.sampled_children)
            proposal = replace(proposal, paths=used)
        tree = self._build(
            this.pending.tolist(),
            proposal,
            self._scorer,
            this.budgets,
            uniforms,
            matched,
            options,
            this.nodes,
            this.cut,
        )
        if self._corrected is not None:
            self._correction.note(self._corrected, tree)
        if heads is not None:
            others = []
            if shadow is not None and shadow.compared:
                others.append((CORRECTION, shadow.row, proposal_of(shadow.proposal, 0, used[shadow.row])))
            remembered = [i for i, path in enumerate(paths) if path is not None]
            if (row := self._in_turn(MEMORY, this, remembered)) is not None:
                switched = None if self.gates.is_on(MEMORY) else paths[row]
                others.append((MEMORY, row, proposal_of(proposal, row, switched)))
            for part, row, other in others:
                size = min(this.budgets[row], tree.tokens.shape[1])
                shape = shape_of(other, self._scorer, size, options, sampled=not matched[row])
                self.gates.compare(part, this.requests[row], this.rows[row], TreeTrace.of(tree, row), shape)
        return tree, proposal.laws

    def watch(self, law: NodeLogits, params: LawParams) -> NodeLogits:
        """What the round's walk is to call in place of `law`."""
        if self._corrected is None:
            return law
        wanted = torch.zeros_like(params.temperature, dtype=torch.bool)
        wanted[self._corrected.of.rows] = True
        self._seen = SeenLaws(law, params, wanted, self._corrected.columns)
        return self._seen

    def learn(self, verified: Verified) -> None:
        """After the walk."""
        if self._corrected is not None and self._seen is not None:
            self._correction.learn(self._corrected, self._seen.laws(verified))
        self._corrected = self._seen = None

    def _from_heads(self, this: RoundBatch, heads: HeadProposer, with_laws: bool) -> tuple[Proposal, _Shadow | None]:
        B, params = len(this.requests), this.params
        embedded = heads.embed(this.pending)
        states = heads.heads(this.hidden, embedded)
        columns = self._vocabulary.current()
        corrected = self._correction.begin(
            this.requests, self._asking(this), (states, this.hidden, embedded), columns, self._vocabulary
        )
        if corrected is None:
            whole = self._candidates(columns.logits(states), params, columns, width=this.nodes, with_laws=with_laws)
            return whole, None
        at = list(corrected.places)
        plain, states = states, states.clone()
        states[corrected.rows] = corrected.states
        on, due = self.gates.is_on(CORRECTION), self._in_turn(CORRECTION, this, at)
        row = due if on else next((place for place in at if _follows(this.requests[place])), None)
        if row is not None:
            # A row more, of what is not verified: without the correction where it is on, with it where it is off.
            spare = plain[row]
            if not on:
                spare, states[row] = states[row].clone(), plain[row]
                at[at.index(row)] = B
            states = torch.cat([states, spare[None]])
            params = params.select(torch.tensor([*range(B), row], device=states.device))
        width = max(this.nodes, TOP)
        whole = self._candidates(columns.logits(states), params, columns, width=width, with_laws=with_laws)
        self._corrected = Proposed(
            corrected,
            columns,
            start=this.lengths[corrected.rows].to(torch.int64),
            temperature=this.params.without_greedy().temperature[corrected.rows],
            tokens=whole.tokens[at, :, :TOP],
            q=whole.log_q[at, :, :TOP].exp(),
        )
        whole = replace(whole, tokens=whole.tokens[..., : this.nodes], log_q=whole.log_q[..., : this.nodes])
        if row is None:
            return whole, None
        laws = None if whole.laws is None else DepthLaws(whole.laws.probs[:B], columns)
        shadow = _Shadow(row, replace(whole, tokens=whole.tokens[B:], log_q=whole.log_q[B:]), due is not None)
        return replace(whole, tokens=whole.tokens[:B], log_q=whole.log_q[:B], laws=laws), shadow

    def _asking(self, this: RoundBatch) -> list[int]:
        """Rows of the batch whose states are to be corrected, or would be were their gate not off."""
        asking = [
            row
            for row, request in enumerate(this.requests)
            if this.budgets[row] > 1 and self._correction.wanted(request) is not None and asks_heads(request)
        ]
        if self.gates.is_on(CORRECTION):
            return asking
        free = [row for row in asking if _follows(this.requests[row])]
        if free:
            scout = next((row for row in free if this.requests[row].rid == self._scout), free[0])
            self._scout = this.requests[scout].rid
            asking = [row for row in asking if row == scout or row not in free]
        return asking

    def _in_turn(self, part: str, this: RoundBatch, rows: Sequence[int]) -> int | None:
        """Which of some rows, that follow the configuration, is to be compared this round; None for none."""
        free = [row for row in rows if this.budgets[row] > 1 and _follows(this.requests[row])]
        if not free or not self.gates.due(part):
            return None
        return free[self.gates.turn(part, len(free))]

    def _by_target_match(self, request) -> bool:
        """Greedy requests, and those with a seed of their own, whose tokens must not depend on the tree."""
        rule = override_of(request).get("rule") or self._rule
        return rule == "target_match" or request.sampling_params.top_k <= 1


def asks_heads(request) -> bool:
    parts = override_of(request).get("parts")
    return parts is None or "heads" in parts


def _follows(request) -> bool:
    """Whether the configuration, and so a gate, decides about a request's parts."""
    return override_of(request).get("parts") is None
