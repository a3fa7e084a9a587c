from __future__ import annotations

import pytest
import torch

from specroll_core.contracts import FinishReason
from specroll_core.finish import Cut, SpecTally, cut_at, cut_block

STOP = 2


@pytest.mark.parametrize(
    ("block", "emitted", "cap", "kept", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], 0, 5, 3, FinishReason.STOP),  # crosses the cap, but stops before it
        ([10, 11, 12, 13, 14, STOP], 0, 5, 5, FinishReason.LENGTH),  # the stop lies beyond the cap
        ([10, 11, 12, 13, STOP], 0, 5, 5, FinishReason.STOP),  # both at once: the stop wins
        ([STOP, STOP, 10], 3, 9, 1, FinishReason.STOP),
        ([10, 11], 3, 5, 2, FinishReason.LENGTH),
        ([10, 11], 3, 6, 2, None),
        ([10], 0, 1, 1, FinishReason.LENGTH),
    ],
)
def test_the_cut(block: list[int], emitted: int, cap: int, kept: int, reason: FinishReason | None) -> None:
    assert cut_block(block, {STOP}, emitted, cap) == Cut(kept, reason)
    first = block.index(STOP) if STOP in block else None
    assert cut_at(len(block), first, emitted, cap) == Cut(kept, reason)


def test_blocks_end_where_token_by_token_decoding_would() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        tokens = torch.randint(0, 12, (40,), generator=g).tolist()
        cap = int(torch.randint(1, 30, (), generator=g))
        plain, reason = [], None
        for token in tokens:
            plain.append(token)
            if token == STOP:
                reason = FinishReason.STOP
                break
            if len(plain) == cap:
                reason = FinishReason.LENGTH
                break
        out: list[int] = []
        tally, cut, at = SpecTally(), Cut(0, None), 0
        while cut.reason is None:
            size = int(torch.randint(1, 7, (), generator=g))
            block = tokens[at : at + size]
            at += len(block)
            cut = cut_block(block, {STOP}, len(out), cap)
            out += block[: cut.kept]
            tally.add(drafted=8, accepted=len(block) - 1, kept=cut.kept, sources=[1] * (len(block) - 1))
        assert (out, cut.reason) == (plain, reason)
        counters = tally.counters()  # checks its own sums
        # Every kept token is that of an accepted node, or the one token that each uncut round adds.
        assert counters.accepted <= len(out) <= counters.accepted + counters.verify_steps


def test_accepted_nodes_that_were_cut_off_are_not_counted() -> None:
    tally = SpecTally()
    tally.add(drafted=5, accepted=4, kept=2, sources=(0, 3, 2, 2))
    tally.add(drafted=5, accepted=1, kept=2, sources=(0,))
    assert tally.counters().accepted_by_depth == (2, 1)
    assert tally.counters().accepted_by_source == (2, 0, 0, 1)  # what the cut took away is nobody's
    assert tally.counters().accepted == 3
    assert tally.counters().drafted == 10
