"""The target's law at the nodes of a tree, and where a block of accepted tokens ends.

Penalties depend on the path to a node, so they are counted per node: over the tokens that the request has sampled
(the root among them) and the drafted tokens between the root and the node. SGLang's own speculation applies the root's
penalties everywhere, which is another law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from specroll_core.finish import Cut, cut_block
from specroll_core.randomness import Stream, uniforms_at
from specroll_core.tree import DraftTree

# On a request: its stop tokens.
_STOPS = "specroll_stops"


class NodeLogitRows:
    """Rows of the step's logits: computed by the forward, or from its hidden states when they are asked for."""

    def __init__(self, values: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> None:
        """values: [B N, V] logits; with `lm_head` [B N, H] hidden states, of which it gives the logits."""
        self._values = values
        self._lm_head = lm_head

    @property
    def whole(self) -> Tensor | None:
        """[B N, V], None where there are hidden states only."""
        return self._values if self._lm_head is None else None

    def __getitem__(self, rows: Tensor) -> Tensor:
        """rows: [n] int64. Returns [n, V] float32."""
        values = self._values.index_select(0, rows)
        return (values if self._lm_head is None else self._lm_head(values)).float()


class NodeLaw:
    """The logits of nodes on demand, penalties and bias included: what `verify` calls at the nodes that it visits."""

    def __init__(self, logits: NodeLogitRows, tree: DraftTree, requests: Sequence, bias: Tensor | None) -> None:
        """requests: SGLang's, before this round's tokens; bias: [B, V] or None."""
        self._nodes = tree.tokens.shape[1]
        self._logits = logits
        self._tree = tree
        self._bias = bias
        self._requests = requests
        self._penalised = {row for row, request in enumerate(requests) if has_penalties(request.sampling_params)}

    @property
    def bare(self) -> Tensor | None:
        """[B N, V] the logits of all nodes, where there are no others and nothing changes them."""
        return None if self._penalised or self._bias is not None else self._logits.whole

    def __call__(self, request: Tensor, node: Tensor) -> Tensor:
        """request, node: [n] int64. Returns [n, V] float32."""
        out = self._logits[request * self._nodes + node]
        if self._penalised:
            for i, (row, at) in enumerate(zip(request.tolist(), node.tolist(), strict=True)):
                if row in self._penalised:
                    penalise(out[i], [*self._requests[row].output_ids, *self._path(row, at)], self._requests[row])
        if self._bias is not None:
            out += self._bias.index_select(0, request)
        return out

    def _path(self, row: int, node: int) -> list[int]:
        inside = self._tree.ancestor_mask[row, node].clone()
        inside[0] = False
        return self._tree.tokens[row, inside].tolist()


def penalise(logits: Tensor, history: Sequence[int], request) -> None:
    """Applies a request's penalties to one node's logits [V] in place, as SGLang defines them for plain decoding.

    history: tokens sampled before the node's own draw. Additive penalties come first, then the scaling one.
    """
    params = request.sampling_params
    seen, times = torch.tensor(history, dtype=torch.int64, device=logits.device).unique(return_counts=True)
    values = logits[seen] - params.frequency_penalty * times - params.presence_penalty
    scale = params.repetition_penalty
    logits[seen] = torch.where(values < 0, values * scale, values / scale)


def has_penalties(params) -> bool:
    """Whether SGLang's `SamplingParams` make a token's probability depend on the tokens before it."""
    return params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1


def round_uniforms(info: SamplingBatchInfo, lengths: Tensor, nodes: int, levels: int) -> tuple[Tensor, Tensor]:
    """What a round draws with, for roots at positions `lengths` [B]: [B, nodes] float64 for the tokens of sampled
    children, and [B, levels, 2], coin and draw of each level of the walk.

    Keyed by the position that is sampled, the draw is the one that plain decoding would use there. A request that is
    verified by target-match alone therefore samples the same tokens with any tree as without one.
    """
    lengths = lengths.to(torch.int64)
    positions = lengths[:, None] + torch.arange(levels, device=lengths.device)
    tree, *walk = uniforms_at(
        info.sampling_seed,
        torch.cat((lengths[:, None], positions), dim=1),
        (Stream.TREE, *[Stream.VERIFY] * levels),
        (nodes, *[2] * levels),
    )
    return tree, torch.stack(walk, dim=1).flip(-1)


def cut(request, block: Sequence[int]) -> Cut:
    """Where a round's tokens end for SGLang's `request`: at the first stop token, else at its length cap.

    Stop strings are SGLang's: it looks for them in the tokens that are kept.
    """
    return cut_block(block, stop_ids(request), len(request.output_ids), request.sampling_params.max_new_tokens)


def stop_ids(request) -> frozenset[int]:
    """The tokens that end a request; with ignore_eos none does, as in SGLang. Found once a request."""
    known = getattr(request, _STOPS, None)
    if known is None:
        params, found = request.sampling_params, set()
        if not params.ignore_eos:
            found = set(params.stop_token_ids or ()) | set(request.eos_token_ids or ())
            if request.tokenizer is not None:
                found.add(request.tokenizer.eos_token_id)
                found.update(request.tokenizer.additional_stop_token_ids or ())
        known = frozenset(found)
        setattr(request, _STOPS, known)
    return known
