"""What a proof found, as a record, as JSON and as words to quote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from services.lossless.greedy import TIE, Divergence
from services.lossless.leaning import LogprobGap
from services.lossless.options import ALL_LAWS, FAMILY, PLAIN
from specroll_core.goodness_of_fit import holm_rejects

# Mean and largest difference of a log-probability to the reference model's. Where numbers have 8 bits the engine and
# the reference round differently; where they have 24 they hardly do.
LOGPROB_BOUNDS = {"float32": (1e-3, 1e-3), "bfloat16": (1e-2, 0.3)}


@dataclass(frozen=True, slots=True)
class Check:
    """One statistical test. kind: "frequencies", "leaning" or "betting"; z where the test has one."""

    kind: str
    way: str
    law: str
    what: str
    samples: int
    p_value: float
    z: float | None = None


@dataclass(slots=True)
class Verdict:
    """detectable: per way of decoding, the share of tokens which, had they come from the drafter's law in place of the
    model's, would have been noticed with 99 % probability. outside: tokens that the law forbids."""

    model: str
    dtype: str
    nodes: int
    checks: list[Check] = field(default_factory=list)
    outside: int = 0
    detectable: dict[str, float] = field(default_factory=dict)
    greedy_prompts: int = 0
    greedy_tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    logprobs: dict[str, LogprobGap] = field(default_factory=dict)
    acceptance_length: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rejected(self) -> list[Check]:
        """The tests that fail by Holm's procedure at a family-wise level of `FAMILY`."""
        return [self.checks[i] for i in holm_rejects([c.p_value for c in self.checks], FAMILY)]

    @property
    def failures(self) -> list[str]:
        """A sentence for each thing that is wrong; none where speculation is lossless as far as this run can tell."""
        found = []
        if any(check.way == PLAIN for check in self.rejected):
            found.append("Plain decoding itself departs from the reference model's law.")
        found += [
            f"{c.way} at {c.law}: {c.what} has p = {c.p_value:.1e}" + ("." if c.z is None else f" (z = {c.z:+.2f}).")
            for c in self.rejected
        ]
        if self.outside:
            found.append(f"{self.outside} tokens came that the law forbids.")
        found += [
            f"At temperature 0, prompt {d.prompt}, token {d.position}: speculation gave {d.speculative} and plain "
            f"decoding {d.plain}, whose logits are {d.gap:.1e} apart."
            for d in self.divergences
            if not d.tie
        ]
        mean, largest = LOGPROB_BOUNDS[self.dtype]
        found += [
            f"Log-probabilities of {way} are off by {gap.mean:.1e} in the mean and {gap.largest:.1e} at most; "
            f"{mean:g} and {largest:g} are allowed."
            for way, gap in self.logprobs.items()
            if gap.mean > mean or gap.largest > largest
        ]
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "failures": self.failures,
            "family_wise_level": FAMILY,
            "model": self.model,
            "dtype": self.dtype,
            "nodes": self.nodes,
            "checks": [asdict(check) for check in self.checks],
            "outside": self.outside,
            "detectable": self.detectable,
            "acceptance_length": self.acceptance_length,
            "greedy": {
                "prompts": self.greedy_prompts,
                "tokens": self.greedy_tokens,
                "divergences": [asdict(d) for d in self.divergences],
            },
            "logprobs": {
                way: {"tokens": gap.tokens, "mean": gap.mean, "max": gap.largest} for way, gap in self.logprobs.items()
            },
            "seconds": self.seconds,
        }

    def as_table(self) -> Group:
        """For a terminal."""
        tests = Table("test", "decoding", "tests", "samples", "largest |z|", "smallest p", box=None)
        for kind, way in dict.fromkeys((c.kind, c.way) for c in self.checks):
            some = [c for c in self.checks if (c.kind, c.way) == (kind, way)]
            z = [abs(c.z) for c in some if c.z is not None]
            # Several tests look at the same tokens: those of each law count once.
            by_law = {(c.law, c.what if kind == "frequencies" else ""): c.samples for c in some if c.law != ALL_LAWS}
            tests.add_row(
                kind,
                way,
                str(len(some)),
                f"{sum(by_law.values()):,}",
                f"{max(z):.2f}" if z else "",
                f"{min(c.p_value for c in some):.2g}",
            )
        gaps = Table("log-probabilities", "tokens", "mean difference", "largest", box=None)
        for way, gap in self.logprobs.items():
            gaps.add_row(way, f"{gap.tokens:,}", f"{gap.mean:.1e}", f"{gap.largest:.1e}")
        parts: list[RenderableType] = [tests, ""] if self.checks else []
        return Group(*parts, gaps, "", *self.sentences())

    def sentences(self) -> Sequence[str]:
        """The verdict in words."""
        out = []
        if self.acceptance_length:
            lengths = ", ".join(f"{way} {length:.2f}" for way, length in self.acceptance_length.items())
            out.append(f"Tokens per verify step with {self.nodes} nodes: {lengths}.")
        if self.greedy_prompts:
            ties = [d for d in self.divergences if d.tie]
            out.append(
                f"Temperature 0: {self.greedy_tokens:,} tokens of {self.greedy_prompts} prompts compared with plain "
                f"decoding, {len(self.divergences) - len(ties)} differences, {len(ties)} ties."
            )
            out += [
                f"  tie: prompt {d.prompt}, token {d.position}: {d.speculative} for {d.plain}, logits "
                f"{d.gap:.1e} apart (a tie is below {TIE:g})"
                for d in ties
            ]
        out += [
            f"Sensitivity of {way}: {share:.2%} of tokens drawn from the drafter's law would be noticed with 99 % "
            "probability."
            for way, share in self.detectable.items()
        ]
        if self.passed:
            what = f"{len(self.checks)} tests" if self.checks else "log-probabilities alone"
            why = "" if self.dtype == "float32" else " (statistics and equality need float32)"
            out.append(f"LOSSLESS: {self.model} in {self.dtype}, {what}, family-wise level {FAMILY:.1%}{why}.")
        else:
            out += [f"  {sentence}" for sentence in self.failures]
            out.append(f"NOT LOSSLESS: {self.model} in {self.dtype}.")
        return out
