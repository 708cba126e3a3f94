"""`dapo`: the integer on the last `Answer:` line, as the DAPO recipe grades it (+1 / -1)."""

from __future__ import annotations

import re

from lightrl.rewards.answer import Answer, text_of

_TAIL = 300  # characters in which the answer must stand
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|overline|boxed|fbox)\s*\{([^{}]*)\}")
_FORMULA = re.compile(r"\$([^$]*)\$")
_ARTICLES = re.compile(r"\ban? ")
_MARKS = re.compile(r"\\[$!,;: ]|\\left|\\right|\{,\}|\^\{?\\circ\}?|[$\s\"]|<\|im_end\|>|<\|endoftext\|>")
_UNITS = re.compile(
    r"(?:square)?(?:units?|degrees?|dollars|cents|points|ways|integers|digits|edges|students|pounds|feet|inches|hours|"
    r"minutes|meters|miles|mph|cm|km|m)(?:\^\{?[23]\}?)?$"
)


def grade_dapo(answer: Answer) -> dict[str, object]:
    """{"score": 1.0 or -1.0, "acc": right or not, "pred": the answer found, "[INVALID]" without an `Answer:` line}."""
    if answer.boxed:
        pred = normalize(answer.response[-_TAIL:])
    else:
        lines = _LINE.findall(answer.response[-_TAIL:])
        pred = normalize(lines[-1]) if lines else "[INVALID]"
    right = pred == gold(answer)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def check_gold(answer: Answer) -> None:
    """Raises ValueError for a label that is not an integer."""
    gold(answer)


def gold(answer: Answer) -> str:
    """The label as an integer in plain digits."""
    text = normalize(text_of(answer.label))
    if re.fullmatch(r"[-+]?\d+(?:\.0+)?", text) is None:
        raise ValueError(f"the label {text[:80]!r} is not an integer, as dapo needs it")
    return str(int(text.partition(".")[0]))


def normalize(text: str) -> str:
    """An answer without its dressing: what follows the last `=`, the first `$formula$` of it, no LaTeX wrappers,
    spaces, units, thousands marks."""
    text = text.rpartition("=")[2].replace("−", "-").replace(r"\$", "")
    if (formula := _FORMULA.search(text)) is not None:
        text = formula[1].rstrip(".")
    while (bare := _WRAPPERS.sub(r"\1", text)) != text:
        text = bare
    text = _UNITS.sub("", _MARKS.sub("", _ARTICLES.sub("", text)))
    digits = text.replace(",", "")
    return digits if digits.lstrip("+-").isdigit() else text
