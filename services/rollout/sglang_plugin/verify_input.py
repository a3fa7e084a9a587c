"""What SGLang carries for a speculative batch: nothing between rounds, a tree during verification."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

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

    draft_token_num: nodes per request. draft_token, positions: [B N] int64. custom_mask: [B N N] bool, flat, row i
    of a request's tree true at i and its ancestors; the attention backend adds the prefix.
    """

    # Branches are irregular: no fixed number of children per level.
    tree_topk = -1

    def __init__(self, tree: DraftTree, lengths: Tensor) -> None:
        """lengths: [B], committed tokens of each request, which is the position of its root."""
        super().__init__()
        nodes = tree.tokens.shape[1]
        self.draft_token_num = self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = nodes
        self.draft_token = tree.tokens.reshape(-1)
        self.positions = (lengths[:, None] + tree.depths).to(torch.int64).reshape(-1)
        self.custom_mask = tree.ancestor_mask.reshape(-1)
        self.capture_hidden_mode = CaptureHiddenMode.FULL

    @property
    def max_tree_depth(self) -> int:
        return self.draft_token_num
