"""`exact`, `number` and `f1`: rules on plain text."""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal

from lightrl.rewards.answer import Answer, text_of
from lightrl.rewards.box import TAIL

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)])-)?(?<!\d)\.\d+")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")  # a partial overlap with these is no partial answer
_DIGITS = 40  # a longer number is not compared: nobody asks for one


def grade_exact(answer: Answer) -> float:
    """1 when the response, stripped, is the label, stripped: the same characters, nothing else."""
    return float(answer.response.strip() == text_of(answer.label))


def grade_number(answer: Answer) -> float:
    """1 when the last number in the response equals the label and the model ended its reply by itself."""
    if answer.status != "completed":
        return 0.0
    numbers = _NUMBER.findall(answer.response[-TAIL:].replace("−", "-"))
    return float(bool(numbers) and len(numbers[-1]) <= _DIGITS and _decimal(numbers[-1]) == _label_number(answer))


def check_number(answer: Answer) -> None:
    """Raises ValueError for a label that is not one number."""
    _label_number(answer)


def grade_f1(answer: Answer) -> float:
    """F1 over words of response and label: lower case, no punctuation, no articles."""
    given, gold = _normalize(answer.response), _normalize(text_of(answer.label))
    if given != gold and (given in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    given_words, gold_words = given.split(), gold.split()
    common = sum((Counter(given_words) & Counter(gold_words)).values())
    return 2 * common / (len(given_words) + len(gold_words)) if common else 0.0


def _label_number(answer: Answer) -> Decimal:
    text = text_of(answer.label).replace("−", "-")
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"the label {text[:80]!r} is not a number")
    return _decimal(text)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _normalize(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
