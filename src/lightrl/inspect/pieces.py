"""The text of each token, where the tokenizer is at hand. No model is looked at."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

Decode = Callable[[list[int]], str]
_LONGEST = 8  # tokens that one character may take


def load_decoder(name: str | None) -> Decode | None:
    """Decoder of a tokenizer's folder, or of a hub name that was downloaded before; None where it is not here."""
    if not name:
        return None
    file = Path(name).expanduser() / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:  # transformers raises many kinds, and none is of interest: ids are shown then
        return None
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False))


def pieces(tokens: list[int], decode: Decode | None) -> list[str]:
    """What each token adds to the text; "" for all but the last token of a character that takes several.

    Without a decoder, the ids.
    """
    if decode is None:
        return [f"{token} " for token in tokens]
    found: list[str] = []
    waiting: list[int] = []
    for place, token in enumerate(tokens):
        waiting.append(token)
        before = tokens[place - len(waiting) : place - len(waiting) + 1] if place >= len(waiting) else []
        head = decode(before) if before else ""
        text = decode(before + waiting)[len(head) :]
        if text.endswith("\ufffd") and len(waiting) < _LONGEST and place + 1 < len(tokens):
            found.append("")
            continue
        found.append(text)
        waiting = []
    return found


def visible(text: str) -> str:
    """Line ends marked, control characters spelled out: what a model writes must not steer the terminal."""
    shown = []
    for character in text:
        if character == "\n":
            shown.append("⏎\n")
        elif character != "\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            shown.append(f"\\u{ord(character):04x}")
        else:
            shown.append(character)
    return "".join(shown)
