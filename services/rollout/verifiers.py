"""Verdicts on completions: the built-in verifiers "math" and "exact", and a user's function by dotted path.

A verifier takes (completion, reference answer) and returns a reward. All of them run in a grading worker, a process
of its own with a hard time limit (`services/rollout/grading.py`), so nothing here limits its own time.

**math** looks for the final answer and compares it with math-verify. A verbose answer counts by its final answer:
the last terminated `\\boxed{...}` where there is one, else what follows "answer", else the last formula or number of
the text. Where math-verify alone is too generous or too strict:

- A completion that ends inside `\\boxed{` was cut off and has no final answer.
- Where the reference is a plain number, the answer must be one too: "3 + 4" is not an answer to "What is 3 + 4?".
  For a whole number a fraction is no answer either; 1,000 and 12.0 and 9% and 1.2 \\times 10^3 are numbers.
- Two numbers must also agree relative to their size. math-verify compares six decimals, by which 1e-7 equals 2e-7.
- Symbols are read as positive, so sqrt(1/n) equals 1/sqrt(n), unless an absolute value or a sign is involved.
- Formulas outside of math mode are read too, on the last line: `\\frac{\\pi}{2}`, pi/2, sqrt(2).

**exact** compares the last number where the reference is a number, else the whole text, stripped.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Verifier = Callable[[str, str], float]

BUILT_IN = ("math", "exact")

# Relative difference up to which two numbers are equal. A rounded decimal may stand for a fraction (0.033333 for
# 1/30), and math-verify has already required six equal decimals.
EXACT_TOLERANCE = 1e-12
ROUNDED_TOLERANCE = 1e-3
# A formula that needs no math mode to be one: a LaTeX command, pi or a root.
_BARE_FORMULA = re.compile(r"\\[a-zA-Z]+|\bpi\b|\bsqrt\s*\(")
_MATH_MODE = re.compile(r"\$|\\\[|\\\(|\\boxed")
_LEAD_IN = re.compile(r".*(?:\bis\b|\bequals\b|:)\s*", re.DOTALL)
_NUMBER = r"[-+]?(?:\d[\d,  ]*(?:\.\d*)?|\.\d+)"
_PLAIN_NUMBER = re.compile(rf"{_NUMBER}(?:\s*\\?%)?(?:\s*(?:\\times|\\cdot|\*|\u00d7)\s*10\^\{{?-?\d+\}}?)?")
_FRACTION = re.compile(r"[-+]?(?:\d+\s*/\s*\d+|\\[dt]?frac\{?\d+\}?\{?\d+\}?)")
_INTEGER = re.compile(r"[-+]?\d[\d,]*")
_LAST_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)")


def resolve(name: str) -> Verifier:
    """The verifier that `reward.verifier` names. Raises ValueError with one sentence where there is none."""
    if name == "exact":
        return exact
    if name == "math":
        return MathVerifier()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"reward.verifier = {name!r} must be 'math', 'exact' or 'package.module:function'.")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a user's module can raise anything
        raise ValueError(f"reward.verifier = {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    try:
        inspect.signature(function).bind("completion", "answer")
    except (TypeError, ValueError):
        raise ValueError(f"reward.verifier = {name!r} must be a function of (completion, answer).") from None
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward.verifier = {name!r} must be a plain function, not a coroutine function.")
    return function  # type: ignore[no-any-return]


def exact(completion: str, answer: str) -> float:
    """1 where the last number of the text, or the whole text where the reference is not a number, is the answer."""
    expected = _decimal(answer)
    if expected is None:
        return float(completion.strip() == answer.strip())
    numbers = _LAST_NUMBER.findall(completion)
    return float(bool(numbers) and _decimal(numbers[-1]) == expected)


def _decimal(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


class MathVerifier:
    """math-verify with the rules of this module's docstring. Building one imports sympy, which takes a second."""

    def __init__(self) -> None:
        import math_verify
        import sympy

        self._library = math_verify
        self._sympy = sympy
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

    def __call__(self, completion: str, answer: str) -> float:
        """1 where the completion's final answer equals the reference, else 0.

        Raises ValueError where the reference cannot be read: no completion could be right then.
        """
        if completion.strip() == answer.strip():
            return 1.0  # also where neither is mathematics
        expected, expected_text = self._parse(_in_math_mode(answer))
        if expected is None and not expected_text:
            raise ValueError(f"the reference answer {answer!r:.80} cannot be read")
        final = _final_answer(completion, plain_number=_PLAIN_NUMBER.fullmatch(answer.strip()) is not None)
        if final is None:
            return 0.0
        given, given_text = self._parse(final)
        if expected is None or given is None:
            return float(expected is None and given is None and expected_text.strip() == given_text.strip())
        if not _is_worked_out(answer.strip(), given_text):
            return 0.0
        return float(self._equal(expected, given))

    def _parse(self, text: str) -> tuple[Any, str]:
        """The expression in the text, None where there is none, and how it was written."""
        expression, written = None, ""
        for item in self._library.parse(text, parsing_timeout=None):
            if isinstance(item, str):
                written = item
            else:
                expression = item
        return expression, written

    def _equal(self, expected: Any, given: Any) -> bool:
        same = self._library.verify(expected, given, timeout_seconds=None)
        expected, given = self._right_hand_side(expected), self._right_hand_side(given)
        if not (isinstance(expected, self._sympy.Expr) and isinstance(given, self._sympy.Expr)):
            return bool(same)
        if same:
            return self._close(expected, given)
        return self._equal_for_positive_symbols(expected, given)

    def _right_hand_side(self, expression: Any) -> Any:
        return expression.rhs if isinstance(expression, self._sympy.Eq) else expression

    def _close(self, expected: Any, given: Any) -> bool:
        """Whether two numbers agree relative to their size; true for anything but two numbers."""
        if any(e.free_symbols or e.has(self._sympy.UnevaluatedExpr) for e in (expected, given)):
            return True  # a formula, or a percentage, which equals its figure and its value alike
        rounded = expected.has(self._sympy.Float) or given.has(self._sympy.Float)
        tolerance = ROUNDED_TOLERANCE if rounded else EXACT_TOLERANCE
        a, b = self._sympy.N(expected, 30), self._sympy.N(given, 30)
        return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))

    def _equal_for_positive_symbols(self, expected: Any, given: Any) -> bool:
        sympy = self._sympy
        symbols = expected.free_symbols
        if not symbols or symbols != given.free_symbols:
            return False
        if any(e.has(sympy.Abs, sympy.sign) or e.doit().has(sympy.Abs, sympy.sign) for e in (expected, given)):
            return False
        positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in symbols}
        difference = (expected - given).xreplace(positive).doit()
        return bool(sympy.simplify(difference) == 0)


def _in_math_mode(answer: str) -> str:
    """A reference answer as math-verify reads formulas: within dollars, with LaTeX's names."""
    return answer if _MATH_MODE.search(answer) else f"${_latex_names(answer.strip())}$"


def _latex_names(text: str) -> str:
    text = re.sub(r"(?<![\\a-zA-Z])pi\b", r"\\pi ", text)
    return re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)


def _final_answer(completion: str, plain_number: bool) -> str | None:
    """The part of a completion that holds its final answer; None where it was cut off inside a box."""
    box = completion.rfind("\\boxed{")
    if box >= 0:
        end = _closing_brace(completion, box + len("\\boxed{"))
        return completion[box : end + 1] if end is not None else None
    if not plain_number:
        lines = completion.strip().splitlines()
        last = lines[-1] if lines else ""
        if _BARE_FORMULA.search(last) and not _MATH_MODE.search(last):
            return f"${_latex_names(_LEAD_IN.sub('', last).strip().rstrip('.'))}$"
    return completion


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def _is_worked_out(answer: str, written: str) -> bool:
    """Whether an answer is a number where the reference is one, and not an expression still to be evaluated."""
    if not _PLAIN_NUMBER.fullmatch(answer):
        return True
    value = written.rpartition("=")[2].strip(" *(){}$.\n")
    if _PLAIN_NUMBER.fullmatch(value):
        return True
    return not _INTEGER.fullmatch(answer) and _FRACTION.fullmatch(value) is not None
