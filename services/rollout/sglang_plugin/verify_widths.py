"""On a GPU: an attention backend and CUDA graphs for every width that a tree may have.

A graph replays one shape. SGLang captures the width that it is started with; the others are captured here, in the way
of its own adaptive speculation, and the worker says before each verification which one is to run. Untested: no GPU has
run this. Its order of steps is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Nodes per request that a GPU verifies, root included; each costs the memory of a set of graphs.
GPU_WIDTHS = (1, 4, 8, 16)


def widths_up_to(most: int) -> tuple[int, ...]:
    """The widths of an engine whose largest tree has `most` nodes, ascending, 1 and `most` among them."""
    return tuple(sorted({1, most} | {width for width in GPU_WIDTHS if width < most}))


def padded(nodes: int, widths: Sequence[int]) -> int:
    """The smallest of the ascending `widths` that holds `nodes`."""
    return next(width for width in widths if width >= nodes)


class VerifyWidths:
    """Switches a model runner between widths.

    runner: SGLang's `ModelRunner`, with the graphs of `captured` nodes. make_graphs(backend, width): captures those of
    another width; None where graphs are off, then only backends are switched.
    """

    def __init__(
        self,
        runner: Any,
        captured: int,
        widths: Sequence[int],
        make_graphs: Callable[[Any, int], Any] | None,
        override: Callable[[int], None],
    ) -> None:
        """override(width): tells SGLang's configuration how many nodes a tree has."""
        self.widths = tuple(widths)
        self._runner = runner
        self._captured = captured
        self._override = override
        self._states = {captured: (runner.attn_backend, runner.decode_cuda_graph_runner)}
        # Graphs share memory: those that need most of it come first.
        for width in sorted(set(widths) - {captured}, reverse=True):
            with self._as_if(width):
                before = runner.init_new_workspace
                try:
                    backend = runner._get_attention_backend(init_new_workspace=True)
                finally:
                    runner.init_new_workspace = before
                self._states[width] = backend, make_graphs(backend, width) if make_graphs is not None else None

    def use(self, nodes: int) -> None:
        """The next verification has `nodes` nodes per request, one of the widths."""
        self._runner.attn_backend, self._runner.decode_cuda_graph_runner = self._states[nodes]

    @contextmanager
    def _as_if(self, width: int) -> Iterator[None]:
        self._override(width)
        try:
            yield
        finally:
            self._override(self._captured)


def of_runner(runner: Any, most: int) -> VerifyWidths:
    """The widths of a GPU engine. runner: SGLang's `ModelRunner`, whose own graphs have been captured for `most`."""
    from sglang.srt.runtime_context import get_context

    def override(width: int) -> None:
        get_context().override("specroll.verify_widths", speculative_num_draft_tokens=width)

    make_graphs = None
    if runner.decode_cuda_graph_captured:
        graphs = type(runner.decode_cuda_graph_runner)

        def make_graphs(backend: Any, width: int) -> Any:
            return graphs(runner, attn_backend=backend, speculative_num_steps=1, speculative_num_draft_tokens=width)

    return VerifyWidths(runner, most, widths_up_to(most), make_graphs, override)
