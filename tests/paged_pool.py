"""A paged pool of keys and values, and attention over it by a naive loop."""

from __future__ import annotations

import torch

SLOTS, CONTEXT, HEADS, KEY_HEADS = 600, 128, 6, 2


def make_pool(lengths, dim, seed=0):
    """A pool of random keys and values, and a slot table whose unused part points past the pool."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(SLOTS, KEY_HEADS, dim, generator=generator)
    values = torch.randn(SLOTS, KEY_HEADS, dim, generator=generator)
    requests = [5, 2, 7, 0, 3][: len(lengths)]
    free = torch.randperm(SLOTS, generator=generator)
    table = torch.full((8, CONTEXT), 10**6, dtype=torch.int32)
    for request, length in zip(requests, lengths, strict=True):
        table[request, :length] = free[:length].int()
        free = free[length:]
    return keys, values, table, requests, generator


def naive_attention(q, keys, values, table, requests, seen):
    """seen[r]: [queries, keys] bool. Softmax in float64, one query and head at a time."""
    dim = keys.shape[2]
    out, at = torch.zeros(q.shape[0], HEADS * dim, dtype=torch.float64), 0
    for request, visible in zip(requests, seen, strict=True):
        for row in visible:
            slots = [int(s) for s, see in zip(table[request].tolist(), row.tolist(), strict=False) if see]
            for h in range(HEADS):
                of_head = h // (HEADS // KEY_HEADS)
                k, v = keys[slots, of_head].double(), values[slots, of_head].double()
                weights = torch.softmax(k @ q[at, h].double() * dim**-0.5, 0)
                out[at, h * dim : (h + 1) * dim] = weights @ v
            at += 1
    return out


def random_trees(count, nodes, generator):
    """[count, nodes, nodes] bool: each node sees itself and its ancestors."""
    trees = torch.zeros(count, nodes, nodes, dtype=torch.bool)
    for tree in trees:
        for node in range(nodes):
            if node:
                parent = int(torch.randint(0, node, (1,), generator=generator))
                tree[node] = tree[parent]
            tree[node, node] = True
    return trees


def seen_in_trees(lengths, trees):
    """What `naive_attention` takes: all keys before the tree, and the ancestors."""
    return [
        torch.cat([torch.ones(len(tree), length, dtype=torch.bool), tree], 1)
        for length, tree in zip(lengths, trees, strict=True)
    ]
