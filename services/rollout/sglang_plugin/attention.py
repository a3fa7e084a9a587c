"""Attention on a CPU: prefill, decode, and verification of trees.

Decode and verification, few queries over many keys, run in `native_attention.py` where that could be compiled.
Prefill, and all else, runs in plain PyTorch. SGLang's `torch_native` backend loops over requests, copies keys and
values once per query head of a group, recomputes the queries of the cached prefix on every extend, and knows no tree
masks. Here:

- the query heads that share a key head become rows of one attention problem, so nothing is copied per head;
- which slots each request reads, and its mask, are found once per forward, not once per layer;
- requests are attended to together, padded to the longest of a chunk, as long as a chunk fits the cache;
- few queries over many keys are two batched products: PyTorch's fused kernel is made for blocks of queries and takes
  about twice as long. Scores and weights stay in float32, as inside that kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.rollout.sglang_plugin.native_attention import Queries, fits, load

# Keys and values of one chunk, both together: past the cache a gather costs more than a loop.
_CHUNK_BYTES = 1 << 22
# Rows of one product (queries times query heads of a key head) up to which products beat the fused kernel, and the
# number of requests and rows from which they do.
_PRODUCT_ROWS = 96
_PRODUCT_WORK = 24
# Queries of one masked call: a long extend is cut into blocks, so that a block skips the keys after it.
_BLOCK_QUERIES = 256


@dataclass
class Chunk:
    """`requests` attention problems of the same size, solved in one call.

    rows: where their queries lie in the batch, `requests * queries` of them, request by request.
    slots: [requests * keys] int64, the pool slots read, padded with a slot of the same request.
    mask: [requests, 1, queries, keys] added to the scores, None where every key is seen.
    causal: the mask is the plain lower triangle and `mask` is None.
    """

    rows: slice | Tensor
    slots: Tensor
    requests: int
    queries: int
    keys: int
    mask: Tensor | None = None
    causal: bool = False
    _made: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def folded_mask(self, group: int) -> Tensor | None:
        """The mask for queries ordered [group, queries], built once and used in every layer."""
        if self.mask is None or self.queries == 1 or group == 1:
            return self.mask
        key = "folded", group, 0
        if key not in self._made:
            self._made[key] = self.mask.repeat(1, 1, group, 1)
        return self._made[key]

    def product_mask(self, group: int, key_heads: int) -> Tensor | None:
        """[requests * key heads, group * queries, keys] float32, likewise built once."""
        if self.mask is None:
            return None
        key = "product", group, key_heads
        if key not in self._made:
            mask = self.mask.float().repeat(1, key_heads, 1 if self.queries == 1 else group, 1)
            self._made[key] = mask.view(self.requests * key_heads, -1, self.keys).expand(-1, group * self.queries, -1)
        return self._made[key]

    def slots_by_head(self, key_heads: int) -> Tensor:
        """[requests * key heads * keys] int64, the same slots in a pool whose heads are rows of their own."""
        key = "slots", 0, key_heads
        if key not in self._made:
            slots = self.slots.view(self.requests, 1, self.keys) * key_heads
            self._made[key] = (slots + torch.arange(key_heads)[:, None]).view(-1)
        return self._made[key]


class TorchTreeAttention(TorchNativeAttnBackend):
    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        self.chunks: list[Chunk] = []
        self.dtype = model_runner.dtype
        pool = self.token_to_kv_pool
        self.queries: Queries | None = None  # of a forward that the compiled function does
        plain = pool.store_dtype == self.dtype and fits(self.dtype, pool.head_dim, pool.v_head_dim)
        self.native = load() if plain else None
        slot_bytes = 2 * pool.head_num * pool.head_dim * pool.store_dtype.itemsize
        self.chunk_keys = max(1, _CHUNK_BYTES // slot_bytes)

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self.chunks, self.queries = [], None
        if mode.is_idle():
            return
        if self.native is not None and (mode.is_target_verify() or mode.is_decode()):
            self.queries = queries_of(forward_batch)
            return
        table = self.req_to_token_pool.req_to_token
        requests = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        if mode.is_target_verify():
            spec = forward_batch.spec_info
            self.chunks = plan_verify(
                table, requests, lengths, spec.draft_token_num, spec.custom_mask, self.dtype, self.chunk_keys
            )
        elif mode.is_decode():
            self.chunks = plan_decode(table, requests, lengths, self.dtype, self.chunk_keys)
        else:
            prefixes = forward_batch.extend_prefix_lens.tolist()
            self.chunks = plan_extend(table, requests, lengths, prefixes, self.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True) -> Tensor:
        if _plain(layer):
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache)
        assert not forward_batch.forward_mode.is_target_verify(), "windowed layers cannot verify trees"
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True) -> Tensor:
        if _plain(layer):
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache: bool) -> Tensor:
        """q: [T, query heads * D]; k, v: [T, key heads, D]. Returns [T, query heads * value D]."""
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if self.native is not None and self.queries is not None:
            table = self.req_to_token_pool.req_to_token
            return self.native.attend(q, keys, values, table, self.queries, layer.scaling)
        return attend(q, keys, values, self.chunks, layer.scaling)


def _plain(layer) -> bool:
    """Whether a layer is causal self-attention over the whole context."""
    window = layer.sliding_window_size
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and (window is None or window <= -1)
        and not layer.logit_cap
    )


def queries_of(forward_batch) -> Queries:
    """Of a decode or of a verification, whose batch has the requests' lengths before the tree."""
    lengths = forward_batch.seq_lens.to(torch.int64)
    requests = forward_batch.req_pool_indices.to(torch.int64)
    if not forward_batch.forward_mode.is_target_verify():
        return Queries(requests, lengths, 1)
    spec = forward_batch.spec_info
    trees = trees_of(spec.custom_mask, lengths.tolist(), spec.draft_token_num)
    return Queries(requests, lengths, spec.draft_token_num, trees.contiguous())


def trees_of(mask: Tensor, lengths: list[int], nodes: int) -> Tensor:
    """[requests, nodes, nodes] bool, True where a node sees another one.

    mask: bool, either of this size, or SGLang's full form: for each request [nodes, length + nodes], all flattened one
    after the other.
    """
    b = len(lengths)
    if mask.numel() == b * nodes * nodes:
        return mask.view(b, nodes, nodes)
    sizes = [nodes * (length + nodes) for length in lengths]
    assert sum(sizes) == mask.numel(), "the mask is neither of the trees nor of the whole sequences"
    parts = zip(mask.split(sizes), lengths, strict=True)
    return torch.stack([part.view(nodes, length + nodes)[:, length:] for part, length in parts])


def attend(q: Tensor, keys: Tensor, values: Tensor, chunks: list[Chunk], scale: float) -> Tensor:
    """Attention of a whole batch over a paged pool.

    q: [T, query heads, D]; keys, values: [slots, key heads, D or value D]. Returns [T, query heads * value D].
    """
    heads, key_heads, value_dim = q.shape[1], keys.shape[1], values.shape[2]
    outputs = [
        _attend_chunk(q, keys, values, chunk, scale).reshape(-1, heads * value_dim).to(q.dtype) for chunk in chunks
    ]
    if len(chunks) == 1 and isinstance(chunks[0].rows, slice):
        return outputs[0]
    out = q.new_empty(q.shape[0], heads * value_dim)
    for chunk, output in zip(chunks, outputs, strict=True):
        out[chunk.rows] = output
    assert heads % key_heads == 0
    return out


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """Returns [requests, queries, query heads (or key heads, group), value D]."""
    b, n, length = chunk.requests, chunk.queries, chunk.keys
    key_heads = keys.shape[1]
    group = q.shape[1] // key_heads
    slots = chunk.slots_by_head(key_heads)
    k = keys.view(-1, keys.shape[2]).index_select(0, slots).view(b, key_heads, length, -1)
    v = values.view(-1, values.shape[2]).index_select(0, slots).view(b, key_heads, length, -1).to(q.dtype)
    if chunk.causal:
        rows = q[chunk.rows].view(b, n, -1, q.shape[2]).transpose(1, 2)
        return scaled_dot_product_attention(
            rows, k.to(q.dtype), v, is_causal=True, scale=scale, enable_gqa=group > 1
        ).transpose(1, 2)
    folded = q[chunk.rows].view(b, n, key_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(b, key_heads, group * n, -1)
    if group * n <= _PRODUCT_ROWS and b * group * n >= _PRODUCT_WORK:
        out = _products(folded.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), chunk, scale)
    else:
        out = scaled_dot_product_attention(folded, k.to(q.dtype), v, attn_mask=chunk.folded_mask(group), scale=scale)
    return out.view(b, key_heads, group, n, -1).permute(0, 3, 1, 2, 4)


def _products(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """q: [requests * key heads, group * queries, D]; k, v: [requests * key heads, keys, D or value D]."""
    key_heads = q.shape[0] // chunk.requests
    rows, k = q.float(), k.float().transpose(1, 2)
    mask = chunk.product_mask(q.shape[1] // chunk.queries, key_heads)
    scores = torch.bmm(rows * scale, k) if mask is None else torch.baddbmm(mask, rows, k, alpha=scale)
    return torch.bmm(scores.softmax(-1).to(v.dtype), v)


def plan_decode(
    table: Tensor, requests: list[int], lengths: list[int], dtype: torch.dtype, chunk_keys: int
) -> list[Chunk]:
    """One query per request, over all of its keys. table: [requests, context], the slots of each position."""
    return _plan(table, requests, lengths, 1, None, dtype, chunk_keys)


def plan_verify(
    table: Tensor,
    requests: list[int],
    lengths: list[int],
    nodes: int,
    tree_mask: Tensor,
    dtype: torch.dtype,
    chunk_keys: int,
) -> list[Chunk]:
    """`nodes` queries per request: each sees the `lengths[r]` keys before the tree, and its ancestors.

    tree_mask: as `trees_of` takes it.
    """
    trees = trees_of(tree_mask, lengths, nodes)
    return _plan(table, requests, [length + nodes for length in lengths], nodes, trees, dtype, chunk_keys)


def plan_extend(
    table: Tensor, requests: list[int], lengths: list[int], prefixes: list[int], dtype: torch.dtype
) -> list[Chunk]:
    """`lengths[r] - prefixes[r]` queries per request, causal, after a prefix that is in the pool already."""
    chunks, at = [], 0
    for request, length, prefix in zip(requests, lengths, prefixes, strict=True):
        slots = table[request, :length].long()
        if prefix == 0 and length > 1:
            chunks.append(Chunk(slice(at, at + length), slots, 1, length, length, causal=True))
        else:
            for start in range(prefix, length, _BLOCK_QUERIES):
                end = min(start + _BLOCK_QUERIES, length)
                seen = torch.ones(end - start, end, dtype=torch.bool).tril(start)
                rows = slice(at + start - prefix, at + end - prefix)
                mask = _additive(seen, dtype)[None, None] if end - start > 1 else None
                chunks.append(Chunk(rows, slots[:end], 1, end - start, end, mask))
        at += length - prefix
    return chunks


def _plan(
    table: Tensor,
    requests: list[int],
    lengths: list[int],
    n: int,
    trees: Tensor | None,
    dtype: torch.dtype,
    chunk_keys: int,
) -> list[Chunk]:
    """Chunks of requests of similar length. trees: [requests, n, n] bool over the last n keys, or None."""
    chunks = []
    for members in _similar(lengths, chunk_keys):
        longest = max(lengths[i] for i in members)
        index = torch.tensor(members)
        slots = table[[requests[i] for i in members], :longest].long()
        padded = any(lengths[i] != longest for i in members)
        mask = None
        if padded or trees is not None:
            ends = torch.tensor([lengths[i] for i in members])
            seen = (torch.arange(longest) < ends[:, None])[:, None].expand(-1, n, -1)
            if trees is not None:
                seen = seen.clone()
                for row, i in enumerate(members):
                    seen[row, :, lengths[i] - n : lengths[i]] = trees[i]
            mask = _additive(seen, dtype)[:, None]
            # Past a request's end the table holds whatever an earlier request left there, or nothing valid.
            slots = torch.where(torch.arange(longest) < ends[:, None], slots, slots[:, :1])
        if members == list(range(members[0], members[0] + len(members))):
            rows: slice | Tensor = slice(members[0] * n, (members[-1] + 1) * n)
        else:
            rows = (index[:, None] * n + torch.arange(n)).view(-1)
        chunks.append(Chunk(rows, slots.reshape(-1), len(members), n, longest, mask))
    return chunks


def _similar(lengths: list[int], chunk_keys: int) -> list[list[int]]:
    """Splits requests into chunks of at most `chunk_keys` keys, padding included; a longer request is alone."""
    if len(lengths) * max(lengths, default=0) <= chunk_keys:
        return [list(range(len(lengths)))] if lengths else []
    chunks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chunks and (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] <= chunk_keys:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return [sorted(chunk) for chunk in chunks]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
