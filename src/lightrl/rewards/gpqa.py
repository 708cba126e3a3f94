"""`gpqa`: the letter of a multiple-choice answer."""

from __future__ import annotations

import re
import string

from lightrl.rewards.answer import Answer
from lightrl.rewards.box import TAIL

# What dresses a letter up: Markdown's stars, brackets, LaTeX. `*+` gives nothing back: with `*`, a run of n spaces
# would be split between two of them in n ways.
_BEFORE = r"(?:[\s:*_$({\[]|\\(?:boxed|text(?:bf|it|rm)?|math(?:bf|it|rm)|\())*+"
_BEHIND = r"[\s*_$)}\]]*+"
_STATED = (
    re.compile(rf"(?i:answer|option|choice){_BEFORE}(?i:is)?{_BEFORE}([A-Z]|[b-hj-z])\b"),  # `a` and `i` are words
    re.compile(rf"\b([A-Z]|[b-hj-z]){_BEHIND}(?i:is)\s*+(?i:the)?\s*+(?i:correct)"),
)
_LETTER = re.compile(r"\b([A-Z])\b")


def grade_gpqa(answer: Answer) -> float:
    """1 for the right letter: the last one stated (`answer is C`, `C is correct`), else the last capital by itself.

    Thinking is left out. A response without any letter is right when it holds the text of the right choice. The right
    one: `metadata.correct_letter`, or a label that is a letter, a position (from 0), or the text of one of
    `metadata.choices`. Valid letters: `metadata.valid_letters`, one for each of the choices, or A-J.
    """
    letters, choices = _letters(answer), _choices(answer)
    right = _right_letter(answer)
    text = answer.response.rpartition("</think>")[2][-TAIL:]
    given = _given_letter(text, letters)
    if given is not None and right is not None:
        return float(given == right)
    targets = [answer.label if isinstance(answer.label, str) else "", answer.metadata.get("correct_answer", "")]
    if right is not None and letters.index(right) < len(choices):
        targets.append(choices[letters.index(right)])
    plain = f" {_plain(text)} "
    # a bare letter is no text to look for: it would be found in any word's neighbourhood
    return float(any(len(_plain(str(t))) > 1 and f" {_plain(str(t))} " in plain for t in targets))


def check_label(answer: Answer) -> None:
    """Raises ValueError when the row does not say which choice is right."""
    correct = answer.metadata.get("correct_letter")
    if correct is not None and str(correct).strip().upper() not in _letters(answer):
        raise ValueError(f"metadata.correct_letter = {correct!r} is not one of {', '.join(_letters(answer))}")
    if _right_letter(answer) is None and not (isinstance(answer.label, str) and len(_plain(answer.label)) > 1):
        raise ValueError(
            f"the label {answer.label!r} names no choice: give a letter, a position from 0, or the choice's text"
        )


def _letters(answer: Answer) -> list[str]:
    given = answer.metadata.get("valid_letters")
    if given:
        return [str(letter).upper() for letter in given]
    return list(string.ascii_uppercase[: len(_choices(answer)) or 10])


def _choices(answer: Answer) -> list[str]:
    choices = answer.metadata.get("choices") or []
    return [str(c) for c in (choices.values() if isinstance(choices, dict) else choices)]


def _right_letter(answer: Answer) -> str | None:
    letters, label = _letters(answer), answer.label
    correct = answer.metadata.get("correct_letter")
    if isinstance(correct, str) and correct.strip().upper() in letters:
        return correct.strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool):
        return letters[int(label)] if int(label) == label and 0 <= label < len(letters) else None
    if not isinstance(label, str):
        return None
    if label.strip().strip("()").upper() in letters:
        return label.strip().strip("()").upper()
    texts = [_plain(choice) for choice in _choices(answer)]
    return letters[texts.index(_plain(label))] if _plain(label) in texts[: len(letters)] else None


def _given_letter(text: str, letters: list[str]) -> str | None:
    for pattern in (*_STATED, _LETTER):
        for letter in reversed(pattern.findall(text)):
            if letter.upper() in letters:
                return str(letter.upper())
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
