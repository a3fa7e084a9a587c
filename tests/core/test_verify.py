"""The emitted law is the target's: whole sequences of toy languages, enumerated and compared."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from specroll_core.goodness_of_fit import chi_square_p, holm_rejects
from specroll_core.growth import TreeOptions
from specroll_core.law import final_logprobs
from specroll_core.proposal import PathCandidate
from specroll_core.scorer import CountTableScorer, Score
from specroll_core.tree import DraftTree, plain_tree
from specroll_core.verified import Verified
from specroll_core.verify import credit, verify
from tests.core.toy import Setting, ToyLanguage, copy_rows, decode, grow, one_law

DRAWS = 100_000
FAMILY = 0.001

LAWS: dict[str, dict[str, float]] = {
    "T=1": {},
    "T=0.6": {"temperature": 0.6},
    "T=1.5": {"temperature": 1.5},
    "top-p": {"top_p": 0.8},
    "T=0.6 top-p": {"temperature": 0.6, "top_p": 0.9},
    "top-k": {"top_k": 2},
    "min-p": {"min_p": 0.15, "temperature": 1.3},
}
TREES = {
    "target-match 6": (6, TreeOptions(sampled_children=False)),
    "target-match chain": (4, TreeOptions(sampled_children=False, chain=3)),
    "sampled 2": (2, TreeOptions()),
    "sampled 6": (6, TreeOptions()),
    "sampled chain 4": (4, TreeOptions(chain=3)),
    "sampled 12": (12, TreeOptions()),
}


def p_value(toy: ToyLanguage, setting: Setting, length: int, seed: int, draws: int = DRAWS) -> float:
    law = toy.sequence_law(length, setting.law)
    numbers, _, _ = decode(toy, setting, length, draws, seed)
    return chi_square_p(numbers.bincount(minlength=len(law)), law)


def test_the_law_of_sequences_over_rules_temperatures_filters_and_trees() -> None:
    p_values, names = [], []
    for seed, ((law_name, law), (tree_name, (nodes, options))) in enumerate(
        itertools.product(LAWS.items(), TREES.items())
    ):
        toy = ToyLanguage(vocab=3 + seed % 3, seed=seed)
        length = 3 if toy.vocab == 3 else 2
        p_values.append(p_value(toy, Setting(law, nodes, options), length, seed=1000 + seed))
        names.append(f"{law_name} / {tree_name}")
    assert [names[i] for i in holm_rejects(p_values, FAMILY)] == []
    # The p-values themselves are spread evenly where the law is right.
    assert 0.3 < sum(p_values) / len(p_values) < 0.7


@pytest.mark.parametrize("law", [*LAWS.values(), {"temperature": 0.0}], ids=[*LAWS, "greedy"])
def test_both_walks_decide_the_same(law: dict[str, float]) -> None:
    """So what is shown of one, with a hundred thousand draws, holds for the other."""
    met = 0
    for seed, (nodes, options) in enumerate([*TREES.values(), (12, TreeOptions(max_depth=5))]):
        for bias, scorer in ((0.0, CountTableScorer(tail_share=1.0)), (0.3, Contrary())):
            toy = ToyLanguage(vocab=5, seed=seed)
            setting = Setting(law, nodes, options, scorer, ids=[0, 2, 3] if seed % 3 == 2 else None)
            g = torch.Generator().manual_seed(seed)
            states = torch.arange(300) % 31
            tree, proposal = grow(toy, setting, states, torch.rand(300, nodes, dtype=torch.float64, generator=g))
            logits = toy.logits(toy.node_prefixes(tree, states).flatten()).view(300, nodes, toy.vocab)
            uniforms = torch.rand(300, tree.depth + 1, 2, dtype=torch.float64, generator=g)
            # Every other request is greedy: batches are mixed.
            some = dataclasses.replace(one_law(law, 300), any_greedy=True)
            some.temperature[::2] = 0
            one, other = (
                verify(tree, logits, some, uniforms, proposal.laws, planted_bias=bias, on_host=on_host)
                for on_host in (True, False)
            )
            for name in ("tokens", "lengths", "nodes"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
            for name in ("logprobs", "child_probs", "slot_accept", "slot_remainder"):
                torch.testing.assert_close(
                    getattr(one, name), getattr(other, name), atol=2e-6, rtol=2e-6, equal_nan=True, msg=name
                )
            met += int((~one.slot_accept.isnan()).sum())
    assert met > 300 or law.get("temperature") == 0  # greedy requests get no sampled children


class Contrary:
    """Scores unlikely candidates highest and makes every last child sampled."""

    def score_depths(self, log_q: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - log_q.exp(), torch.full_like(log_q, -1, dtype=torch.int64)

    def score(self, log_q: float, memory: float, order: int, depth: int) -> Score:
        return Score(memory, -1)

    def tail(self, depth: int, mass: float, remainder: float) -> Score:
        return Score(1.0, -1)


def test_the_law_holds_with_adversarial_drafters_and_scorers() -> None:
    p_values, names = [], []
    for kind, (nodes, ids) in itertools.product(
        ("random", "inverse", "peaked", "same"), ((6, None), (3, None), (5, [0, 2, 3]), (8, [1]))
    ):
        toy = ToyLanguage(vocab=4, seed=7)
        next_target = toy.target[:, None].expand(-1, 3, -1)
        if kind == "inverse":
            toy.drafter = -next_target * 2
        elif kind == "peaked":
            toy.drafter = torch.full_like(toy.drafter, -60.0)
            toy.drafter[..., 1] = 60.0
        elif kind == "same":
            toy.drafter = next_target.clone()
        setting = Setting({}, nodes, scorer=Contrary(), ids=ids)
        p_values.append(p_value(toy, setting, length=2, seed=len(names)))
        names.append(f"{kind} {nodes} {ids}")
    assert [names[i] for i in holm_rejects(p_values, FAMILY)] == []


class Reactive:
    """A memory whose suggestions depend on the path, and on every token that was ever descended into.

    It remembers sampled tokens the moment that it sees them and then suggests whatever would exploit them: if the tree
    asked again about a node whose child is drawn already, the emitted law would be wrong.
    """

    max_depth = 4

    def __init__(self, prefix: int, vocab: int) -> None:
        self.vocab = vocab
        self.seen: list[int] = [prefix]

    def root(self) -> int:
        return 0

    def descend(self, state: int, token: int) -> int:
        self.seen.append(token)
        return (state + 1) * 7 + token

    def children(self, state: int) -> list[PathCandidate]:
        likely = (state + sum(self.seen)) % self.vocab
        return [PathCandidate(likely, 0.9, 5), PathCandidate((likely + 1) % self.vocab, 0.5, 2)]


def test_the_law_holds_with_a_memory_that_reacts_to_draws() -> None:
    toy = ToyLanguage(vocab=3, seed=21)
    setting = Setting({"temperature": 0.9, "top_p": 0.95}, 4, paths=lambda prefix: Reactive(prefix, 3))
    assert p_value(toy, setting, length=2, seed=5) > FAMILY


def test_a_shape_that_sees_the_draw_is_detected() -> None:
    """The failure that the order of steps prevents: a draw that pushes its siblings out of the tree."""

    def tamper(tree: DraftTree, prefix: Tensor) -> DraftTree:
        row, slot = (tree.sampled & (tree.depths == 1)).nonzero(as_tuple=True)
        pushes = torch.zeros(len(prefix), dtype=torch.bool)
        pushes[row] = tree.tokens[row, slot] >= 2
        dropped = pushes[:, None] & (tree.parents == 0) & ~tree.sampled
        # The rule then takes X for a draw from the whole law.
        mass = torch.where(pushes[:, None] & tree.sampled, 1.0, tree.slot_mass)
        return dataclasses.replace(tree, valid=tree.valid & ~dropped, slot_mass=mass)

    toy = ToyLanguage(vocab=4, seed=3)
    options = TreeOptions(max_depth=1)
    assert p_value(toy, Setting({}, 3, options, Contrary()), length=2, seed=1) > FAMILY
    assert p_value(toy, Setting({}, 3, options, Contrary(), tamper=tamper), length=2, seed=1) < FAMILY


def test_accepting_two_per_cent_too_often_is_detected() -> None:
    toy = ToyLanguage(vocab=3, seed=3)
    assert p_value(toy, Setting({}, 2), length=2, seed=9, draws=1_000_000) > FAMILY
    assert p_value(toy, Setting({}, 2, coin_scale=0.98), length=2, seed=9, draws=1_000_000) < FAMILY


def test_temperature_zero_is_the_argmax_walk() -> None:
    toy = ToyLanguage(vocab=5, seed=4)
    setting = Setting({"temperature": 0.0}, 8)
    numbers, logprobs, per_round = decode(toy, setting, length=5, draws=50, seed=0)
    prefix, expected = 0, 0
    for _ in range(5):
        token = int(toy.target[min(prefix, len(toy.target) - 1)].argmax())
        prefix, expected = prefix * 5 + token + 1, expected * 5 + token
    assert numbers.unique().tolist() == [expected]
    assert logprobs.abs().max() == 0
    assert per_round >= 1


@pytest.mark.parametrize("law", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=["T=1", "filtered"])
def test_reported_logprobs_are_those_of_the_emitted_law(law: dict[str, float]) -> None:
    toy = ToyLanguage(vocab=3, seed=8)
    exact = toy.sequence_law(3, law)
    numbers, logprobs, _ = decode(toy, Setting(law, 6), length=3, draws=2_000, seed=3)
    torch.testing.assert_close(logprobs.double(), exact[numbers].log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("law", [{}, {"temperature": 0.6}, {"top_p": 0.8}], ids=["T=1", "T=0.6", "top-p"])
@pytest.mark.parametrize("sampled", [False, True])
def test_acceptance_at_the_root_has_its_closed_form(law: dict[str, float], sampled: bool) -> None:
    toy = ToyLanguage(vocab=6, seed=11)
    setting = Setting(law, 3, TreeOptions(max_depth=1, sampled_children=sampled), scorer=Contrary())
    _, _, per_round = decode(toy, setting, length=1, draws=400_000, seed=2)
    p = final_logprobs(toy.target[:1], one_law(law, 1))[0].double().exp()
    q = (toy.drafter[0, 0].double() / law.get("temperature", 1.0)).softmax(-1)
    order = q.argsort()  # the contrary scorer takes the least likely first
    if sampled:
        s, rest = order[:1], order[1:]
        acceptance = p[s].sum() + torch.minimum(p[rest], q[rest] / q[rest].sum()).sum()
    else:
        acceptance = p[order[:2]].sum()
    assert per_round - 1 == pytest.approx(float(acceptance), abs=0.004)


@pytest.mark.parametrize("on_host", [True, False])
def test_feedback_is_the_exact_acceptance_of_visited_children(on_host: bool) -> None:
    toy = ToyLanguage(vocab=5, seed=12)
    setting = Setting({}, 8)
    states = torch.tensor([0, 1, 2])
    tree, proposal = grow(toy, setting, states, torch.rand(3, 8, dtype=torch.float64))
    prefixes = toy.node_prefixes(tree, states)
    logits, uniforms = toy.logits(prefixes.flatten()).view(3, 8, 5), torch.rand(3, 5, 2).double()
    result = verify(tree, logits, one_law({}, 3), uniforms, proposal.laws, on_host=on_host)
    p = toy.logits(prefixes.flatten()).softmax(-1).view(3, 8, 5)
    for row in range(3):
        visited = set(result.nodes[row, : int(result.lengths[row])].tolist())
        for node in range(1, 8):
            parent = int(tree.parents[row, node])
            seen = bool(tree.valid[row, node]) and parent in visited
            if tree.sampled[row, node]:
                siblings = [n for n in range(8) if tree.parents[row, n] == parent and n != node]
                s = tree.tokens[row, siblings]
                q = proposal.laws.probs[row, int(tree.depths[row, node]) - 1].clone()
                q[s] = 0
                q /= q.sum()
                expected = torch.minimum(p[row, parent], q).sum()
                assert bool(result.slot_accept[row, node].isnan()) != seen
                if seen:
                    torch.testing.assert_close(result.slot_accept[row, node], expected)
                    torch.testing.assert_close(result.slot_remainder[row, node], 1 - p[row, parent, s].sum())
            elif seen:
                torch.testing.assert_close(result.child_probs[row, node], p[row, parent, tree.tokens[row, node]])
            else:
                assert bool(result.child_probs[row, node].isnan())
    scorer = CountTableScorer()
    credit(scorer, tree, result)
    assert float(scorer.counts[1].sum()) == float((~result.child_probs.isnan()).sum())


def test_a_plain_tree_draws_one_token_from_the_law() -> None:
    toy = ToyLanguage(vocab=6, seed=14)
    params = one_law({"temperature": 0.8, "top_p": 0.9}, 50)
    logits = toy.target[:50, None]
    u = torch.rand(50, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = verify(plain_tree([0] * 50), logits, params, u)
    log_p = final_logprobs(logits[:, 0], params)
    expected = (log_p.double().exp().cumsum(-1) <= u[:, 0, 1:]).sum(-1)
    assert torch.equal(result.pending, expected)
    assert torch.equal(result.lengths, torch.ones(50, dtype=torch.int64))
    torch.testing.assert_close(result.logprobs, log_p.gather(1, expected[:, None]))


def test_the_walk_is_consistent() -> None:
    toy = ToyLanguage(vocab=4, seed=13)
    states = torch.arange(200) % 21
    tree, proposal = grow(toy, Setting({}, 10), states, torch.rand(200, 10, dtype=torch.float64))
    prefixes = toy.node_prefixes(tree, states)
    result = verify(
        tree, lambda r, n: toy.logits(prefixes[r, n]), one_law({}, 200), torch.rand(200, 5, 2).double(), proposal.laws
    )
    for row in range(200):
        length = int(result.lengths[row])
        nodes = result.nodes[row, :length].tolist()
        assert nodes[0] == 0
        for i in range(1, length):
            assert int(tree.parents[row, nodes[i]]) == nodes[i - 1]
            assert int(tree.tokens[row, nodes[i]]) == int(result.tokens[row, i - 1])
        assert int(result.pending[row]) == int(result.tokens[row, length - 1])
        assert int(result.last_nodes[row]) == nodes[-1]
        assert result.tokens[row, length:].eq(-1).all()


def test_a_planted_bias_takes_the_last_child_so_often_and_leaves_greedy_requests_alone() -> None:
    toy = ToyLanguage(vocab=6, seed=11)
    rows, bias = 200_000, 0.1
    setting = Setting({}, 3, TreeOptions(max_depth=1, sampled_children=False), scorer=Contrary())
    tree, _ = grow(toy, setting, torch.zeros(1, dtype=torch.int64), torch.rand(1, 3, dtype=torch.float64))
    tree = copy_rows(tree, torch.zeros(rows, dtype=torch.int64))
    g = torch.Generator().manual_seed(0)
    uniforms = torch.rand(rows, 2, 2, dtype=torch.float64, generator=g)

    def logits(request: Tensor, node: Tensor) -> Tensor:
        return toy.target[:1].expand(len(request), -1)

    found = verify(tree, logits, one_law({}, rows), uniforms, planted_bias=bias, on_host=False)
    first, last = tree.tokens[0, 1:].tolist()
    p = toy.target[0].double().softmax(-1)
    expected = p * (1 - bias)
    expected[first] = p[first]
    expected[last] = p[last] + bias * (1 - p[first] - p[last])
    frequencies = found.tokens[:, 0].bincount(minlength=6) / rows
    torch.testing.assert_close(frequencies.double(), expected, atol=0.004, rtol=0)
    greedy = one_law({"temperature": 0.0}, rows)
    found = verify(tree, logits, greedy, uniforms, planted_bias=bias, on_host=False)
    assert found.tokens[:, 0].unique().numel() == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_the_nodes_of_a_walk_come_before_the_others(on_host):
    walks = [[0, 2, 5], [0, -1, -1], [0, 1, -1]]
    nothing = torch.zeros(3, 3)
    verified = Verified(
        nothing, nothing, torch.tensor([3, 1, 2]), torch.tensor(walks), child_probs=nothing, slot_accept=nothing,
        slot_remainder=nothing,
    )  # fmt: skip
    expected = [[0, 2, 5, 1, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert verified.walked_first(6, on_host).tolist() == expected


@pytest.mark.parametrize("with_memory", [False, True], ids=["heads", "heads and memory"])
def test_the_law_holds_where_the_scores_decide_how_much_is_verified(with_memory: bool) -> None:
    """A cut that depends on every score of a tree in a way no policy would."""
    sizes = set()

    def cut(scores: list[list[float]]) -> int:
        nodes = 1 + int(1e6 * sum(map(sum, scores))) % 7
        sizes.add(nodes)
        return nodes

    p_values = []
    laws = [{}, {"temperature": 0.6}, {"temperature": 0.9, "top_p": 0.95}]
    for seed, law in enumerate(laws[-1:] if with_memory else laws):  # with a memory each tree is grown for itself
        toy = ToyLanguage(vocab=3, seed=40 + seed)
        paths = (lambda prefix: Reactive(prefix, 3)) if with_memory else None
        setting = Setting(law, 6, scorer=Contrary() if seed == 1 else CountTableScorer(), paths=paths, cut=cut)
        length, draws = (2, 20_000) if with_memory else (3, DRAWS)
        p_values.append(p_value(toy, setting, length, seed=50 + seed, draws=draws))
    assert holm_rejects(p_values, FAMILY) == []
    assert len(sizes) > 1
