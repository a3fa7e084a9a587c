"""`native/tree_growth.cpp`: the trees that `specroll_core.tree.build_tree` builds, grown from native memories.

The same decisions by the same operations on doubles, so the trees are equal in every field. Only the sums that a
sampled child is drawn by are added up in another order, within rounding.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.rollout.sglang_plugin import native_memory
from services.rollout.sglang_plugin.native_code import library
from services.rollout.sglang_plugin.native_memory import NativeMemory, memory_classes
from specroll_core.growth import TreeOptions
from specroll_core.proposal import Proposal
from specroll_core.scorer import CountTableScorer, Scorer
from specroll_core.tree import MAX_NODES, DraftTree, build_tree

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Edges(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("count", _INTEGER))


class _Scorer(ctypes.Structure):
    _fields_ = (
        *((name, _Edges) for name in ("log_q", "memory", "order", "depth", "tail_mass")),
        *((name, _POINTER) for name in ("counts", "tail_counts")),
        *((name, _INTEGER) for name in ("cells", "tail_cells")),
        ("powers", _POINTER),
        ("power_count", _INTEGER),
        *((name, _REAL) for name in ("prior_trials", "head_cap", "memory_share", "tail_share", "no_log_q")),
    )


class _Proposal(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "log_q", "prior")),
        *((name, _INTEGER) for name in ("rows", "depths", "ranks")),
        ("laws", _POINTER),
        *((name, _INTEGER) for name in ("law_depths", "columns")),
        *((name, _POINTER) for name in ("ids", "inverse")),
    )


class _Options(ctypes.Structure):
    _fields_ = (("max_depth", _INTEGER), ("chain", _INTEGER), ("min_tail", _REAL))


class _Trees(ctypes.Structure):
    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            "tokens", "parents", "depths", "cells", "tail_cells", "valid", "sampled", "ancestors", "masses", "steps",
            "paths",
        )
    )  # fmt: skip


class _KnownScorer:
    """A scorer and its tables as C++ reads them. The scorer writes its counts in place, so this is made once."""

    def __init__(self, scorer: CountTableScorer) -> None:
        self.scorer = scorer
        tables = scorer.tables()
        assert tables.counts.dtype == tables.tail_counts.dtype == torch.float64
        assert tables.counts.is_contiguous()
        assert tables.tail_counts.is_contiguous()
        self._held = [array("d", numbers) for numbers in (*tables[:5], tables.powers)]
        *edges, powers = [(numbers.buffer_info()[0], len(numbers)) for numbers in self._held]
        self.fields = _Scorer(
            *(_Edges(*of) for of in edges),
            tables.counts.data_ptr(),
            tables.tail_counts.data_ptr(),
            tables.counts.shape[1],
            tables.tail_counts.shape[1],
            *powers,
            *tables[8:],
        )


class NativeGrowth:
    """The compiled functions, and what they keep between two of them: one for each thread that builds trees. Use
    `load`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        _declare(code)
        self.classes = memory_classes(code)
        self._grow, self._finish = code.specroll_grow, code.specroll_finish
        self._round = code.specroll_round_new()
        weakref.finalize(self, code.specroll_round_free, self._round)
        self._known: _KnownScorer | None = None

    @staticmethod
    def fits(proposal: Proposal, scorer: Scorer) -> bool:
        """Whether there is code for what proposes."""
        return (
            type(scorer) is CountTableScorer
            and proposal.tokens.device.type == "cpu"
            and all(path is None or isinstance(path, NativeMemory) for path in proposal.paths)
        )

    def build_tree(
        self,
        pending: Sequence[int],
        proposal: Proposal,
        scorer: Scorer,
        budgets: Sequence[int],
        uniforms: Tensor,
        greedy: Sequence[bool] | None = None,
        options: TreeOptions | None = None,
        width: int | None = None,
        cut: Callable[[list[list[float]]], int] | None = None,
    ) -> DraftTree:
        """As `specroll_core.tree.build_tree`, by it where there is no code for what proposes."""
        if not self.fits(proposal, scorer):
            return build_tree(pending, proposal, scorer, budgets, uniforms, greedy, options, width, cut)
        assert isinstance(scorer, CountTableScorer)
        options = options or TreeOptions()
        B, nodes = len(pending), max(budgets) if width is None else width
        assert min(budgets) >= 1
        assert max(budgets) <= nodes <= MAX_NODES
        assert uniforms.shape[0] == B == len(budgets) == proposal.rows
        assert uniforms.dtype == torch.float64
        if self._known is None or self._known.scorer is not scorer:
            self._known = _KnownScorer(scorer)
        # Whatever is passed by address is held by a name until the second call has returned.
        tokens, log_q, drawn = proposal.tokens.contiguous(), proposal.log_q.contiguous(), uniforms.contiguous()
        prior = scorer.head_prior(log_q)
        assert tokens.dtype == torch.int64
        assert log_q.dtype == prior.dtype == torch.float32
        of = _Proposal(tokens.data_ptr(), log_q.data_ptr(), prior.data_ptr(), *tokens.shape)
        laws = None
        if proposal.laws is not None:
            laws, vocabulary = proposal.laws.probs.contiguous(), proposal.laws.vocabulary
            assert laws.dtype == torch.float32
            of.laws, of.law_depths, of.columns = laws.data_ptr(), laws.shape[1], laws.shape[2]
            if vocabulary.ids is not None and vocabulary.inverse is not None:
                of.ids, of.inverse = vocabulary.ids.data_ptr(), vocabulary.inverse.data_ptr()
        handles = [path.handle if isinstance(path, NativeMemory) else None for path in proposal.paths]
        scores, found = (_REAL * (B * (nodes - 1)))(), (_INTEGER * B)()
        self._grow(
            self._round,
            ctypes.byref(of),
            ctypes.byref(self._known.fields),
            ctypes.byref(_Options(options.max_depth, options.chain, options.min_tail)),
            (_POINTER * B)(*handles),
            (_INTEGER * B)(*pending),
            (_INTEGER * B)(*budgets),
            nodes,
            scores,
            found,
        )
        if cut is not None:
            starts = range(0, B * (nodes - 1), nodes - 1) if nodes > 1 else [0] * B
            nodes = cut([scores[i : i + n] for i, n in zip(starts, found, strict=True)])
        deterministic = None
        if options.sampled_children and laws is not None:
            deterministic = bytes(B) if greedy is None else bytes(greedy)
        integers = torch.empty(5, B, nodes, dtype=torch.int64)
        flags, ancestors = torch.empty(2, B, nodes, dtype=torch.bool), torch.empty(B, nodes, nodes, dtype=torch.bool)
        masses, numbers = torch.empty(B, nodes, dtype=torch.float64), torch.empty(2, B, nodes)
        columns = *integers.unbind(), *flags.unbind(), ancestors, masses, *numbers.unbind()
        depth = self._finish(
            self._round,
            nodes,
            drawn.data_ptr(),
            drawn.shape[1],
            deterministic,
            ctypes.byref(_Trees(*(x.data_ptr() for x in columns))),
        )
        tokens, parents, depths, cells, tail_cells, valid, sampled, ancestors, masses, steps, paths = columns
        return DraftTree(
            tokens=tokens,
            parents=parents,
            depths=depths,
            valid=valid,
            ancestor_mask=ancestors,
            sampled=sampled,
            slot_mass=masses,
            step_scores=steps,
            path_scores=paths,
            cells=cells,
            tail_cells=tail_cells,
            depth=depth,
            any_sampled=deterministic is not None and bool(sampled.any()),
        )


def load() -> NativeGrowth | None:
    """None where it cannot be compiled here."""
    code = library("tree_growth")
    return None if code is None else NativeGrowth(code)


def _declare(code: ctypes.CDLL) -> None:
    native_memory.declare(code)
    p, i = _POINTER, _INTEGER
    for name, result, arguments in (
        ("round_new", p, ()),
        ("round_free", None, (p,)),
        ("grow", None, (p, p, p, p, p, p, p, i, p, p)),
        ("finish", i, (p, i, p, i, p, p)),
    ):
        function = getattr(code, f"specroll_{name}")
        function.restype, function.argtypes = result, arguments
