"""Boxes: the last complete `\\boxed{…}` or `\\fbox{…}` of a text."""

from __future__ import annotations

import re

TAIL = 50_000
"""Characters looked at, from the end: the answer stands there, and a million characters must not cost a second."""

_TOKENS = re.compile(
    r"\\{1,2}(?:boxed|fbox)\s*(?P<open>\{)|\\(?:boxed|fbox)\s*(?P<bare>[-−+]?\d[\d.,/]*|[A-Z]\b)|\\.|[{}]", re.S
)


def last_box(text: str) -> str | None:
    r"""Contents of the box that opens last among those that close; None without one.

    Escaped braces are text. `\boxed 5` boxes a bare number or a capital letter.

    >>> last_box(r"\boxed{3} or \boxed{\frac{1}{2}} or \boxed{4")
    '\\frac{1}{2}'
    """
    text = text[-TAIL:]
    opened: list[int] = []  # where the contents of each open box begin; -1 for other braces
    best: tuple[int, str] = (-1, "")
    for token in _TOKENS.finditer(text):
        if token["open"]:
            opened.append(token.end())
        elif token["bare"]:
            best = (token.end(), token["bare"].rstrip(".,"))
        elif token[0] == "{":
            opened.append(-1)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start > best[0]:
                best = (start, text[start : token.start()])
    return None if best[0] < 0 else best[1].strip()
