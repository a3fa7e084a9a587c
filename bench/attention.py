"""Times our CPU attention against SGLang's `torch_native`, all in turn on the same pool.

python bench/attention.py [--threads 1] [--dtype bfloat16] [--chunk-bytes ...]

One line per case: microseconds of a layer, medians of alternating repetitions, and how many times as long
`torch_native` takes as what serves: the compiled function where there is one, our PyTorch code elsewhere. A plan, made
once per forward for the latter, is timed on its own. "tree" is a chain of nodes, the one shape of tree that
`torch_native` can do: as an extend. Shapes are SmolLM2-135M's: 9 query heads, 3 key heads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from services.rollout.sglang_plugin import attention as ours
from services.rollout.sglang_plugin.native_attention import Queries, load

HEADS, KEY_HEADS, DIM = 9, 3, 64
SLOTS = 40_000
SCALE = DIM**-0.5
# Queries of a request up to which they may be a tree's nodes.
MOST_NODES = 32


class Case:
    """`requests` requests of `length` keys, `queries` of them new (1: decode); lengths vary by a quarter."""

    def __init__(self, requests: int, length: int, queries: int, dtype: torch.dtype, chunk_bytes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        spread = torch.randint(-(length // 8), length // 8 + 1, (requests,), generator=generator)
        self.lengths = [max(queries, length + int(d)) for d in spread]
        self.keys = torch.randn(SLOTS, KEY_HEADS, DIM).to(dtype)
        self.values = torch.randn(SLOTS, KEY_HEADS, DIM).to(dtype)
        free = torch.randperm(SLOTS, generator=generator).int()
        self.table = torch.zeros(requests, max(self.lengths), dtype=torch.int32)
        at = 0
        for r, n in enumerate(self.lengths):
            self.table[r, :n] = free[at : at + n]
            at += n
        self.queries = queries
        self.q = torch.randn(requests * queries, HEADS, DIM).to(dtype)
        self.out = torch.empty_like(self.q)
        self.dtype = dtype
        self.chunk_keys = chunk_bytes // (2 * KEY_HEADS * DIM * dtype.itemsize)
        self.rows = torch.arange(requests)
        self.seq_lens = torch.tensor(self.lengths)
        self.chunks = self.plan()
        self.compiled = load() if queries <= min(MOST_NODES, length - 1) else None
        trees = torch.ones(queries, queries, dtype=torch.bool).tril().expand(requests, -1, -1).contiguous()
        self.of_compiled = Queries(self.rows, self.seq_lens - queries, queries, trees)
        if queries == 1:
            self.of_compiled = Queries(self.rows, self.seq_lens, 1)

    def plan(self) -> list[ours.Chunk]:
        requests = self.rows.tolist()
        if self.queries == 1:
            return ours.plan_decode(self.table, requests, self.lengths, self.dtype, self.chunk_keys)
        prefixes = [n - self.queries for n in self.lengths]
        return ours.plan_extend(self.table, requests, self.lengths, prefixes, self.dtype)

    def run_ours(self) -> torch.Tensor:
        return ours.attend(self.q, self.keys, self.values, self.chunks, SCALE)

    def run_compiled(self) -> torch.Tensor:
        return self.compiled.attend(self.q, self.keys, self.values, self.table, self.of_compiled, SCALE)

    def run_native(self) -> torch.Tensor:
        backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
        common = (self.q, self.out, self.keys, self.values, self.table, self.rows, self.seq_lens)
        if self.queries == 1:
            backend._run_sdpa_forward_decode(*common, scaling=SCALE, enable_gqa=True, causal=False)
        else:
            new = torch.full_like(self.seq_lens, self.queries)
            backend._run_sdpa_forward_extend(
                *common, self.seq_lens - new, new, scaling=SCALE, enable_gqa=True, causal=True
            )
        return self.out


def alternate(functions: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median microseconds of each, called in turn for about `seconds` in all."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples[0]) < 5:
        for function, times in zip(functions, samples, strict=True):
            start = time.perf_counter()
            function()
            times.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(times) for times in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-bytes", type=int, default=ours._CHUNK_BYTES)
    parser.add_argument("--seconds", type=float, default=0.4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    cases = [(b, length, 1) for length in (128, 512) for b in (1, 2, 4, 8, 16, 32)]
    cases += [(b, 250 + n, n) for n in (5, 9, 17) for b in (1, 2, 4, 8)]
    cases += [(b, n, n) for n in (16, 128) for b in (1, 4, 32)] + [(1, 1024, 1024)]
    cases += [(b, 256 + n, n) for n in (64, 128) for b in (1, 4, 32)]
    print("kind     requests  keys  queries  compiled us  PyTorch us  torch_native us   ratio  plan us  max diff")
    for requests, length, queries in cases:
        case = Case(requests, length, queries, dtype, args.chunk_bytes)
        runs = [case.run_ours, case.run_native, case.plan]
        if case.compiled is not None:
            runs.append(case.run_compiled)
        diff = max(
            (run().view_as(case.out) - case.run_native()).abs().max().item() for run in (case.run_ours, *runs[3:])
        )
        mine, native, plan, *compiled = alternate(runs, args.seconds)
        kind = "decode" if queries == 1 else "prefill" if queries == length else "tree" if compiled else "extend"
        print(
            f"{kind:8} {requests:8} {length:5} {queries:8} {compiled[0] if compiled else float('nan'):12.0f} "
            f"{mine:11.0f} {native:16.0f} {native / (compiled[0] if compiled else mine):7.2f} {plan:8.0f} {diff:9.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
