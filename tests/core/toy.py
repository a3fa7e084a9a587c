"""A toy language whose law is known for every prefix, and speculative decoding over many copies of it at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams, final_logprobs
from specroll_core.proposal import DepthLaws, Proposal, propose_from_logits
from specroll_core.scorer import CountTableScorer, Scorer
from specroll_core.tree import DraftTree, TreeOptions, build_tree
from specroll_core.verify import Verified, verify


class ToyLanguage:
    """Random logits for every prefix over `vocab` tokens. A prefix is a number: n -> n * vocab + token + 1, from 0."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.5, heads: int = 3, longest: int = 7) -> None:
        g = torch.Generator().manual_seed(seed)
        size = sum(vocab**i for i in range(longest + 1))
        self.vocab = vocab
        self.target = torch.randn(size, vocab, generator=g) * spread
        self.drafter = torch.randn(size, heads, vocab, generator=g) * spread

    def logits(self, prefix: Tensor) -> Tensor:
        return self.target[prefix.clamp_max(len(self.target) - 1)]

    def node_prefixes(self, tree: DraftTree, prefix: Tensor) -> Tensor:
        """[B, N]: the prefix that each node stands for, where node 0 stands for `prefix`."""
        out = prefix[:, None].repeat(1, tree.tokens.shape[1])
        for node in range(1, tree.tokens.shape[1]):
            parent = out.gather(1, tree.parents[:, node, None].clamp_min(0)).squeeze(1)
            out[:, node] = parent * self.vocab + tree.tokens[:, node] + 1
        return out

    def sequence_law(self, length: int, law: dict[str, float]) -> Tensor:
        """[vocab ** length] float64: exact probability of every sequence, by enumeration."""
        out = []
        for sequence in itertools.product(range(self.vocab), repeat=length):
            prefix, logp = 0, 0.0
            for token in sequence:
                row = final_logprobs(self.logits(torch.tensor([prefix])), one_law(law, 1))[0]
                logp += float(row[token])
                prefix = prefix * self.vocab + token + 1
            out.append(logp)
        p = torch.tensor(out, dtype=torch.float64).exp()
        return p / p.sum()


def one_law(law: dict[str, float], rows: int) -> LawParams:
    return LawParams.build(
        [law.get("temperature", 1.0)] * rows,
        [int(law.get("top_k", -1))] * rows,
        [law.get("top_p", 1.0)] * rows,
        [law.get("min_p", 0.0)] * rows,
    )


@dataclasses.dataclass
class Setting:
    """How a toy decodes: the law, the tree and what may tamper with it."""

    law: dict[str, float]
    nodes: int = 6
    options: TreeOptions = dataclasses.field(default_factory=TreeOptions)
    scorer: Scorer = dataclasses.field(default_factory=lambda: CountTableScorer(tail_share=1.0))
    ids: list[int] | None = None
    tamper: Callable[[DraftTree, Tensor], DraftTree] | None = None
    coin_scale: float = 1.0
    paths: Callable[[int], object] | None = None
    cut: Callable[[list[list[float]]], int] | None = None


def decode(toy: ToyLanguage, setting: Setting, length: int, draws: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Decodes `draws` sequences of `length` tokens speculatively.

    With the walk made for a GPU: a hundred thousand rows at once are what it is good at, and `test_verify.py` shows
    that the other one decides the same. Returns their numbers in the order of `sequence_law` [draws], the summed
    reported log-probabilities [draws], and tokens per round. Without path proposers one tree is grown per distinct
    prefix and copied, with fresh draws for its sampled children: the shape cannot depend on them.
    """
    g = torch.Generator().manual_seed(seed)
    emitted = torch.zeros(draws, length, dtype=torch.int64)
    logprobs = torch.zeros(draws, length)
    done = torch.zeros(draws, dtype=torch.int64)
    prefix = torch.zeros(draws, dtype=torch.int64)
    rounds = tokens = 0
    while (active := (done < length).nonzero().squeeze(1)).numel():
        verified = one_round(toy, setting, prefix[active], g)
        rounds += active.numel()
        tokens += int(verified.lengths.sum())
        for i in range(verified.tokens.shape[1]):
            room = (i < verified.lengths) & (done[active] < length)
            rows = active[room]
            emitted[rows, done[rows]] = verified.tokens[room, i]
            logprobs[rows, done[rows]] = verified.logprobs[room, i]
            prefix[rows] = prefix[rows] * toy.vocab + verified.tokens[room, i] + 1
            done[rows] += 1
    weights = toy.vocab ** torch.arange(length - 1, -1, -1)
    return emitted @ weights, logprobs.sum(1), tokens / rounds


def one_round(toy: ToyLanguage, setting: Setting, prefix: Tensor, g: torch.Generator) -> Verified:
    rows = prefix.numel()
    if setting.paths is None:
        states, which = prefix.unique(return_inverse=True)
    else:
        states, which = prefix, torch.arange(rows)
    tree, proposal = grow(
        toy, setting, states, torch.rand(len(states), setting.nodes, dtype=torch.float64, generator=g)
    )
    laws = proposal.laws
    assert laws is not None
    if setting.paths is None:
        laws = DepthLaws(laws.probs[which], laws.vocabulary)
        tree = redraw(copy_rows(tree, which), laws, g)
    if setting.tamper is not None:
        tree = setting.tamper(tree, prefix)
    prefixes = toy.node_prefixes(tree, prefix)
    uniforms = torch.rand(rows, tree.depth + 1, 2, dtype=torch.float64, generator=g)
    uniforms[..., 0] *= setting.coin_scale
    return verify(
        tree, lambda r, n: toy.logits(prefixes[r, n]), one_law(setting.law, rows), uniforms, laws, on_host=False
    )


def grow(toy: ToyLanguage, setting: Setting, states: Tensor, uniforms: Tensor) -> tuple[DraftTree, Proposal]:
    rows = len(states)
    ids = None if setting.ids is None else torch.tensor(setting.ids)
    vocabulary = ProposalVocabulary(torch.zeros(toy.vocab, 1), ids)
    logits = toy.drafter[states.clamp_max(len(toy.drafter) - 1)]
    paths = [setting.paths(int(s)) for s in states] if setting.paths else ()
    proposal = propose_from_logits(
        logits if ids is None else logits[..., ids], one_law(setting.law, rows), vocabulary, paths=paths
    )
    greedy = [setting.law.get("temperature", 1.0) == 0] * rows
    budgets = [setting.nodes] * rows
    tree = build_tree([0] * rows, proposal, setting.scorer, budgets, uniforms, greedy, setting.options, cut=setting.cut)
    return tree, proposal


def copy_rows(tree: DraftTree, which: Tensor) -> DraftTree:
    tensors = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    return dataclasses.replace(tree, **{k: v[which] for k, v in tensors.items() if isinstance(v, Tensor)})


def redraw(tree: DraftTree, laws: DepthLaws, g: torch.Generator) -> DraftTree:
    """Draws every sampled child of every row anew."""
    row, slot = tree.sampled.nonzero(as_tuple=True)
    if row.numel() == 0:
        return tree
    siblings = (tree.parents[row] == tree.parents[row, slot][:, None]) & ~tree.sampled[row] & tree.valid[row]
    excluded = torch.where(siblings, tree.tokens[row], -1)
    uniforms = torch.rand(row.numel(), dtype=torch.float64, generator=g)
    tokens, mass = laws.draw(row, tree.depths[row, slot], excluded, uniforms)
    out = tree.tokens.clone()
    out[row, slot] = tokens
    masses = tree.slot_mass.clone()
    masses[row, slot] = mass
    return dataclasses.replace(tree, tokens=out, slot_mass=masses)
