"""What a GPU engine is given for trees: masks over whole sequences, stand-ins for capture, widths. Run on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.rollout.sglang_plugin import SPECULATIVE_ALGORITHM
from services.rollout.sglang_plugin.attention import plan_verify
from services.rollout.sglang_plugin.verify_input import (
    TreeVerifyInput,
    dummy_for_capture,
    full_mask,
    spec_info_for_capture,
)
from services.rollout.sglang_plugin.verify_widths import VerifyWidths, padded, widths_up_to
from specroll_core.tree import plain_tree


def random_trees(requests, nodes, generator):
    """[requests, nodes, nodes] bool, each node under a random earlier one."""
    trees = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    for r in range(requests):
        for node in range(nodes):
            trees[r, node, node] = True
            if node:
                trees[r, node] |= trees[r, int(torch.randint(node, (1,), generator=generator))]
    return trees


@pytest.mark.parametrize(("lengths", "nodes"), [([5], 1), ([3, 1, 8], 4), ([1, 1], 7)])
def test_the_full_mask_row_by_row(lengths, nodes):
    trees = random_trees(len(lengths), nodes, torch.Generator().manual_seed(1))
    expected = []
    for tree, length in zip(trees, lengths, strict=True):
        for node in range(nodes):
            expected += [True] * length + tree[node].tolist()
    got = full_mask(trees, torch.tensor(lengths, dtype=torch.int32), sum(lengths))
    assert got.tolist() == expected
    # Our own attention takes either form, and is tested with the trees alone.
    table = torch.arange(400, dtype=torch.int32).view(4, 100)
    plans = [
        plan_verify(table, list(range(len(lengths))), lengths, nodes, mask, torch.float32, 1000)
        for mask in (got, trees.reshape(-1))
    ]
    for full, alone in zip(*plans, strict=True):
        assert full.mask is not None
        assert full.mask.equal(alone.mask)


def test_what_flashinfer_asks_for():
    lengths, nodes = torch.tensor([3, 6]), 4
    trees = random_trees(2, nodes, torch.Generator().manual_seed(2))
    mask = full_mask(trees, lengths, 9)
    packed = []
    translator = SimpleNamespace(pack_read_stream=lambda _, **call: packed.append(call))
    # A graph for three requests replays with two: the third has one token and whatever mask.
    _, keys, queries, seen = TreeVerifyInput(nodes, mask).generate_attn_arg_prefill(
        req_pool_indices=torch.tensor([4, 5, 0]),
        paged_kernel_lens=torch.tensor([3, 6, 1]),
        paged_kernel_lens_sum=10,
        translator=translator,
        plan=None,
    )
    assert queries.tolist() == [0, 4, 8, 12]
    assert keys.tolist() == [0, 7, 17, 22]
    assert seen[: len(mask)].equal(mask)
    assert len(seen) == 4 * (7 + 10 + 5)
    assert packed[0]["seq_lens"].tolist() == [7, 10, 5]


def test_a_plain_tree_sees_all_before_it():
    made = TreeVerifyInput.of(plain_tree([7, 8]), torch.tensor([3, 5]), 8)
    assert made.positions is not None
    assert made.draft_token is not None
    assert (made.draft_token.tolist(), made.positions.tolist()) == ([7, 8], [3, 5])
    assert made.custom_mask.all()
    assert made.num_tokens_per_req == 1


def test_capture_gets_a_stand_in_for_our_algorithm_only():
    ours, other = SimpleNamespace(name=SPECULATIVE_ALGORITHM), SimpleNamespace(name="NGRAM")
    mask = torch.ones(100, dtype=torch.bool)
    made = dummy_for_capture(None, ours, mask, 6, False)
    assert made.draft_token_num == 6
    assert made.custom_mask is mask
    assert made.capture_hidden_mode.is_full()
    assert dummy_for_capture(lambda *call: call, other, mask, 6, False) == (other, mask, 6, False)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(spec_algorithm=ours),
        captured_req_width=8,
        buffers=SimpleNamespace(custom_mask=mask),
    )
    assert spec_info_for_capture(None, runner, 16).num_tokens_per_req == 8
    runner.model_runner.spec_algorithm = other
    assert spec_info_for_capture(lambda *call: call, runner, 16) == (runner, 16)


@pytest.mark.parametrize(
    ("most", "widths"),
    [(17, (1, 4, 8, 16, 17)), (16, (1, 4, 8, 16)), (6, (1, 4, 6)), (1, (1,)), (63, (1, 4, 8, 16, 63))],
)
def test_widths_end_with_the_largest_tree(most, widths):
    assert widths_up_to(most) == widths
    for nodes in range(1, most + 1):
        fits = [width for width in widths if width >= nodes]
        assert padded(nodes, widths) == min(fits)


class Runner:
    """Of SGLang's `ModelRunner` what is switched."""

    def __init__(self):
        self.attn_backend, self.decode_cuda_graph_runner, self.init_new_workspace = "backend", "graphs", False
        self.width = 16

    def _get_attention_backend(self, init_new_workspace):
        assert init_new_workspace
        self.init_new_workspace = True
        return f"backend of {self.width}"


def make_widths(runner, make_graphs):
    told = []

    def override(width):
        told.append(width)
        runner.width = width

    return VerifyWidths(runner, 16, (1, 4, 16), make_graphs, override), told


def test_each_width_has_a_backend_and_graphs_of_its_own():
    runner = Runner()
    widths, told = make_widths(runner, lambda backend, width: (backend, runner.width, width))
    assert told == [4, 16, 1, 16]  # as if of each width in turn, the larger one first, and as it was after each
    assert (runner.attn_backend, runner.init_new_workspace) == ("backend", False)
    widths.use(4)
    assert runner.attn_backend == "backend of 4"
    assert runner.decode_cuda_graph_runner == ("backend of 4", 4, 4)
    widths.use(16)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("backend", "graphs")
    with pytest.raises(KeyError):
        widths.use(8)


def test_without_graphs_backends_are_switched_all_the_same():
    runner = Runner()
    widths, _ = make_widths(runner, None)
    widths.use(1)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("backend of 1", None)


def test_a_failed_capture_leaves_the_configuration_as_it_was():
    runner = Runner()

    def fail(backend, width):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        make_widths(runner, fail)
    assert runner.width == 16
    assert runner.init_new_workspace is False
