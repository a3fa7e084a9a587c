"""The hidden-state correction beside SGLang's requests: who asks for it, and whose state it is.

Nothing is allocated before a request asks. State follows the request's id, not its row, so it is kept through a
retraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from services.config import SpeculationConfig
from services.rollout.sglang_plugin.directions_maker import DirectionsMaker
from services.rollout.sglang_plugin.overrides import override_of
from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from specroll_core.bias_correction import BiasCorrection
from specroll_core.correction import CorrectionOptions, FastWeights
from specroll_core.corrector import Corrector
from specroll_core.credit_correction import CreditCorrection
from specroll_core.heads import ProposalVocabulary
from specroll_core.live_correction import Corrected, Learner, LiveCorrection
from specroll_core.seen_laws import Laws
from specroll_core.soft_correction import SoftCorrection, SoftOptions
from specroll_core.tree import DraftTree

# The parts of a `SpeculationOverride` that are kept here: a trajectory's own weights, or its group's.
CORRECTION, CORRECTION_GROUP = "correction", "correction-group"
# On a request: the `CorrectionSlots` that keeps something for it.
_KEEPER = "specroll_correction"
# All state of one worker. Where it does not hold all requests that run, those that came last go without.
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Proposed:
    """Of the n requests of a round whose states were corrected. columns: what was ranked. start, temperature: [n], the
    pending tokens' positions, and what the laws were taken at; tokens, q: [n, K, C], the likely ones."""

    of: Corrected
    columns: ProposalVocabulary
    start: Tensor
    temperature: Tensor
    tokens: Tensor
    q: Tensor


class CorrectionSlots:
    """One per worker."""

    def __init__(
        self,
        config: SpeculationConfig,
        requests: int,
        lm_head: Callable[[], Tensor],
        key: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """requests: that can run at once. lm_head: returns the [V, H] weights as they are now. key: what the soft form
        compares places by, of the states and embeddings [B, H] there."""
        modes = {"off": None, "trajectory": CORRECTION, "group": CORRECTION_GROUP}
        self._default: str | None = modes[config.correction]
        self._options = CorrectionOptions()
        self._requests = requests
        self._form = config.correction_form
        self._lm_head = lm_head
        self._key = key
        self._hidden_size = lm_head().shape[1]
        self._device = lm_head().device
        self._maker: DirectionsMaker | None = None
        self.live: LiveCorrection | None = None

    def wanted(self, request) -> str | None:
        """The part that a request asks for, None for neither."""
        parts = override_of(request).get("parts")
        if parts is None:
            return self._default
        return next((part for part in (CORRECTION, CORRECTION_GROUP) if part in parts), None)

    def begin(
        self,
        requests: Sequence,
        rows: Sequence[int],
        states: tuple[Tensor, Tensor, Tensor],
        columns: ProposalVocabulary,
        served: ServedVocabulary,
    ) -> Corrected | None:
        """Corrected states of some of a batch's requests, `rows` in the batch, which asked for them; None while nothing
        is ready. states: the heads' [B, K, H], those before the pending tokens and these tokens' embeddings [B, H]."""
        if not rows:
            return None
        z, hidden, embedded = states
        if self._form == "credit":
            if self.live is None:
                # A vector and a margin for each head.
                slots = self._slots(2 * z.shape[1])
                self._allocate(CreditCorrection(slots, z.shape[1], self._hidden_size, self._rows), slots, z.shape[1])
        elif not self._directed(z.shape[1], hidden, embedded, columns, served):
            return None
        assert self.live is not None
        return self.live.correct([self._learner(requests[row], row) for row in rows], z, hidden, embedded)

    def note(self, proposed: Proposed, tree: DraftTree) -> None:
        """Before the round's walk."""
        assert self.live is not None
        self.live.note(proposed.of, proposed.start, proposed.temperature, proposed.tokens, proposed.q, tree)

    def learn(self, proposed: Proposed, laws: Laws) -> None:
        """After it."""
        assert self.live is not None
        self.live.learn(proposed.of, proposed.start, laws)

    def policy_changed(self) -> None:
        if self._maker is not None:
            self._maker.policy_changed()

    def halve(self) -> None:
        """The heads have changed."""
        if self.live is not None:
            self.live.halve()

    def close(self, rid: str) -> None:
        """A request has ended."""
        if self.live is not None:
            self.live.close(rid)

    def _learner(self, request, row: int) -> Learner:
        setattr(request, _KEEPER, self)
        group = override_of(request).get("group") if self.wanted(request) == CORRECTION_GROUP else None
        return Learner(row, request.rid, group)

    def _directed(
        self, heads: int, hidden: Tensor, embedded: Tensor, columns: ProposalVocabulary, served: ServedVocabulary
    ) -> bool:
        """Takes in the directions that are ready; False before there are any."""
        if self._maker is None:
            self._maker = DirectionsMaker(self._hidden_size, self._device, self._options)
        self._maker.see(hidden, embedded)
        made = self._maker.current(columns, served)
        if made is None:
            return False
        directions, features = made
        if self.live is None:
            corrector: FastWeights | BiasCorrection | SoftCorrection
            if self._form == "soft":
                size = self._key(hidden[:1], embedded[:1]).shape[1]
                options = SoftOptions()
                # Tokens and weights of a place take 12 bytes each, as three numbers do.
                numbers = heads * options.places * (size + 3 * options.tokens)
                slots = self._slots(-(-numbers // self._hidden_size))
                corrector = SoftCorrection(slots, heads, directions, self._key, size, options)
            elif self._form == "bias":
                slots = self._slots(heads)
                corrector = BiasCorrection(slots, heads, directions)
            else:
                slots = self._slots(heads * features.size)
                corrector = FastWeights(slots, heads, directions, features, self._options)
            self._allocate(corrector, slots, heads)
        assert self.live is not None
        if isinstance(self.live.corrector, FastWeights | BiasCorrection | SoftCorrection):
            self.live.corrector.directions = directions
        return True

    def _allocate(self, corrector: Corrector, slots: int, heads: int) -> None:
        self.live = LiveCorrection(corrector, slots, heads, self._device)

    def _slots(self, vectors: int) -> int:
        """How many there are, with so many vectors of a state's size in each."""
        return max(1, min(self._requests, _MOST_BYTES // (vectors * self._hidden_size * 4)))

    def _rows(self, tokens: Tensor) -> Tensor:
        return self._lm_head()[tokens]


def finish(requests: Sequence) -> None:
    """Drops what is kept for those of SGLang's requests that have finished or were aborted."""
    for request in requests:
        if request.finished() and (keeper := getattr(request, _KEEPER, None)) is not None:
            keeper.close(request.rid)
