"""`math` and `deepscaler`: mathematical equality by math-verify, which parses LaTeX and compares with sympy.

Its own timeouts use signals and work in a main thread only, so they are off: the scorer runs these rules in worker
processes, which it kills when they take too long.
"""

from __future__ import annotations

import re
from typing import Any

from lightrl.rewards.answer import Answer, text_of
from lightrl.rewards.box import last_box

LONGEST_ANSWER = 1000
"""Characters of an answer that is still parsed; a longer one is wrong."""
_PROSE_TAIL = 3000  # characters of a response without a box in which math-verify looks for an answer
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:/[1-9]\d*)?")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*|no", re.IGNORECASE)
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_DISPLAY = {"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "％": "%", "×": r"\times ", "π": r"\pi "}
_DISPLAY_TABLE = str.maketrans(_DISPLAY)


def grade_math(answer: Answer) -> float:
    """1 when the answer equals the label. The answer: the last complete box, else what math-verify finds in the end."""
    boxed = answer.response if answer.boxed else last_box(answer.response)
    if boxed is not None:
        return _equal(boxed, answer.label)
    prose = answer.response[-_PROSE_TAIL:].translate(_DISPLAY_TABLE)
    return float(_verify(_parse_gold(_gold(answer.label)), _parse(prose)))


def grade_deepscaler(answer: Answer) -> float:
    """As `math`, for models that think first: only a box after `</think>` (or `###Response`) counts.

    A response with neither mark is graded whole; `reward.missing_think` governs it.
    """
    if answer.boxed:
        return _equal(answer.response, answer.label)
    boxed = last_box(after_thinking(answer.response))
    return 0.0 if boxed is None else _equal(boxed, answer.label)


def check_gold(answer: Answer) -> None:
    """Raises ValueError for a label that is no mathematics: no answer could be told right from wrong."""
    gold = _gold(answer.label)
    if not gold:
        raise ValueError("the label is empty")
    if _NUMBER.fullmatch(gold) or _WORDS.fullmatch(_plain(gold)):  # no parser needed
        return
    if not any(not isinstance(parsed, str) for parsed in _parse_gold(gold)):
        raise ValueError(f"the label {gold[:80]!r} cannot be parsed as mathematics")


def after_thinking(response: str) -> str:
    """The part of a response that follows its thinking, or all of it."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return response.rpartition(mark)[2]
    return response


def _gold(label: Any) -> str:
    """The gold answer: what is boxed in the label, what follows GSM8K's `####`, or the label."""
    text = text_of(label)
    boxed = last_box(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2].strip().strip("$").strip()


def _equal(given: str, label: Any) -> float:
    gold = _gold(label)
    given = _THIN_SPACE.sub("", given.translate(_DISPLAY_TABLE)).strip(" ,;")
    if not given or len(given) > LONGEST_ANSWER:
        return 0.0
    plain, plain_gold = _plain(given), _plain(gold.translate(_DISPLAY_TABLE))
    if plain == plain_gold:
        return 1.0
    if _WORDS.fullmatch(plain_gold):  # as mathematics, `on` were the product `no`
        return float(plain.casefold() == plain_gold.casefold())
    return float(_verify(_parse_gold(gold), _parse(rf"\boxed{{{given}}}")))


def _plain(text: str) -> str:
    return " ".join(_TEXT.sub(r"\1", text).replace(r"\!", "").split()).strip(" $.")


def _parse_gold(gold: str) -> list[Any]:
    return _parse(rf"\boxed{{{gold.translate(_DISPLAY_TABLE)}}}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


def _verify(gold: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, given, timeout_seconds=None))
