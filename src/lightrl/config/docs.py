"""`docs/configuration.md` from the schema: `python -m lightrl.config.docs --write` (or `--check`)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lightrl.config.fields import Key, describe, section_docs

DEFAULT_FILE = Path("docs/configuration.md")

_INTRO = """# Configuration

Generated from `src/lightrl/config/schema.py` by `python -m lightrl.config.docs --write`: edit the docs there.

Defaults < TOML files, left to right < `--section.key value` on the command line:

```sh
lightrl train base.toml mine.toml --optim.lr 2e-6 --rollout.group_size 16
lightrl config show base.toml mine.toml --optim.lr 2e-6    # the result, as TOML
lightrl config check base.toml                             # errors, without starting anything
lightrl config list                                        # this list
```

Files merge key by key: a later file changes only the keys that it names. Lists, the `[[eval.sets]]` tables among them,
are replaced as a whole. On the command line a list is written as in TOML (`--rollout.stop_token_ids "[1, 2]"`); one
value stands for a list of one (`--log.trackers jsonl`). A key without a default is unset, and has no spelling in TOML:
leave it out. From Python: `load_config("run.toml", optim={"lr": 2e-6})`.

A key that others leave without effect is an error. Those that only tune another `engine.kind`, or another command, are
not, so that one file serves several: a run begins with a note that names them.
"""


def markdown() -> str:
    """The whole page: a table a section."""
    parts = [_INTRO]
    docs = section_docs()
    for section, keys in groupby(describe(), key=lambda key: key.section):
        title = f"[[{section}]]" if "." in section else f"[{section}]"
        rows = [f"| `{key.name}` | {_code(_type(key))} | {_code(key.default)} | {_cell(key.doc)} |" for key in keys]
        head = f"\n## `{title}`\n\n{docs[section]}\n\n| key | type | default | |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "".join(parts)


def listing(word: str = "", width: int = 100) -> str:
    """Keys whose full name contains `word`, for a terminal: name, type and default, doc below."""
    lines = []
    for key in describe():
        if word in key.full_name:
            lines.append(f"{key.full_name} = {key.default or '(unset)'}  ({_type(key)})")
            lines += textwrap.wrap(key.doc, width, initial_indent="    ", subsequent_indent="    ")
    return "".join(line + "\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or check that it is current. Returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    file = Path(args[1]) if len(args) == 2 else DEFAULT_FILE
    if len(args) not in (1, 2) or args[0] not in ("--write", "--check"):
        print("usage: python -m lightrl.config.docs --write|--check [FILE]", file=sys.stderr)
        return 2
    if args[0] == "--write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(markdown(), encoding="utf-8")
        return 0
    if file.is_file() and file.read_text(encoding="utf-8") == markdown():
        return 0
    print(f"{file} is not current: run `python -m lightrl.config.docs --write {file}`", file=sys.stderr)
    return 1


def _type(key: Key) -> str:
    return f"{key.type} {key.range}" if key.range else key.type


def _code(text: str) -> str:
    """A table cell in code type; a pipe in it needs a backslash."""
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
