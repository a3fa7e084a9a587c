"""What SGLang carries for a speculative batch: nothing between rounds, a tree during verification."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from services.rollout.sglang_plugin import SPECULATIVE_ALGORITHM
from specroll_core.tree import DraftTree


class BetweenRounds(SpecInput):
    """Stands where SGLang expects the next round's draft input.

    What must live between rounds is in `RequestSlots`, indexed by pool row, so batches may be filtered, merged and
    retracted without this object knowing.
    """

    future_indices: Tensor | None = None

    def __init__(self) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Called when requests leave the batch."""

    def merge_batch(self, other: SpecInput) -> None:
        """Called when requests join the batch."""


class TreeVerifyInput(BetweenRounds):
    """One round's trees for the TARGET_VERIFY forward.

    draft_token_num: nodes per request. draft_token, positions: [B N] int64. custom_mask: bool, flat, true where a node
    sees another one: on a CPU [B N N], itself and its ancestors, to which our attention backend adds the prefix; on a
    GPU SGLang's full form (`full_mask`).
    """

    # Branches are irregular: no fixed number of children per level.
    tree_topk = -1
    # What flashinfer asks a verify input for, from the mask and the number of nodes.
    generate_attn_arg_prefill = NgramVerifyInput.generate_attn_arg_prefill

    def __init__(
        self, nodes: int, custom_mask: Tensor, tokens: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """tokens, positions: None where a graph is captured, which has buffers of its own for them."""
        super().__init__()
        self.draft_token_num = self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = nodes
        self.draft_token, self.positions, self.custom_mask = tokens, positions, custom_mask
        self.device = custom_mask.device
        self.capture_hidden_mode = CaptureHiddenMode.FULL

    @staticmethod
    def of(tree: DraftTree, lengths: Tensor, total: int) -> TreeVerifyInput:
        """lengths: [B], committed tokens of each request, which is the position of its root; total: their sum."""
        seen = tree.ancestor_mask
        mask = seen.reshape(-1) if seen.device.type == "cpu" else full_mask(seen, lengths, total)
        positions = (lengths[:, None] + tree.depths).to(torch.int64).reshape(-1)
        return TreeVerifyInput(tree.tokens.shape[1], mask, tree.tokens.reshape(-1), positions)

    @property
    def max_tree_depth(self) -> int:
        return self.draft_token_num


def full_mask(trees: Tensor, lengths: Tensor, total: int) -> Tensor:
    """The mask over whole sequences: of each request [N, length + N], one after the other, flat.

    trees: [B, N, N] bool; lengths: [B], keys before each tree, all of which are seen; total: their sum, known on the
    host, so that nothing waits for the device.
    """
    B, N, _ = trees.shape
    columns = lengths.to(torch.int64) + N
    starts = N * (columns.cumsum(0) - columns)
    places = torch.arange(N, device=trees.device)
    at = (starts + lengths)[:, None, None] + places[:, None] * columns[:, None, None] + places
    mask = torch.ones(N * (total + B * N), dtype=torch.bool, device=trees.device)
    mask[at] = trees
    return mask


def dummy_for_capture(original, algorithm, custom_mask: Tensor, nodes: int, *args, **kwargs):
    """A hook around `create_dummy_verify_input`: SGLang knows its own algorithms only."""
    if algorithm.name == SPECULATIVE_ALGORITHM:
        return TreeVerifyInput(nodes, custom_mask)
    return original(algorithm, custom_mask, nodes, *args, **kwargs)


def spec_info_for_capture(original, runner, *args, **kwargs):
    """The same around `DecodeCudaGraphRunner.get_spec_info`."""
    if runner.model_runner.spec_algorithm.name == SPECULATIVE_ALGORITHM:
        return TreeVerifyInput(runner.captured_req_width, runner.buffers.custom_mask)
    return original(runner, *args, **kwargs)
