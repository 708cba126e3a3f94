"""Which keys of `[engine.args]` SGLang takes, and which are not the user's to set; without importing sglang, as that
takes longer than loading a model."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightrl.engine.sglang_versions import version_problem
from lightrl.errors import UserError

# Set from `[engine]` and `[model]`, or needed for what the trainer does with the engine.
OURS = {
    "model_path": "model.path",
    "tp_size": "engine.tensor_parallel",
    "mem_fraction_static": "engine.memory_fraction",
    "max_running_requests": "engine.max_batch",
    "max_prefill_tokens": "engine.max_prefill_tokens",
    "trust_remote_code": "model.trust_remote_code",
    "base_gpu_id": "the rank's own GPU",
    "skip_tokenizer_init": "always on: ids go in and out",
    "enable_memory_saver": "always on",
    "custom_weight_loader": "LightRL's own",
    "host": "loopback",
    "port": "a free one",
    "random_seed": "run.seed",
    "stream_output": "off: answers are looked at whole",
    "enable_return_routed_experts": "correction.routing_replay",
    "incremental_streaming_output": "off: answers are looked at whole",
}
_SIMPLE = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_WORDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string"}


def check_installed() -> None:
    """UserError when SGLang is missing or of an unknown version."""
    try:
        text = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise UserError(
            "engine.kind: 'sglang' is not installed: pip install 'lightrl-torch[gpu]', or engine.kind = 'transformers'"
        ) from None
    if problem := version_problem(text):
        raise UserError(f"engine.kind: {problem}")


def check(args: Mapping[str, Any]) -> None:
    """UserError for what can be seen to be wrong before anything is started."""
    types = declared()
    check_names(args, types)
    check_values(args, types)


def check_names(args: Collection[str], known: Collection[str]) -> None:
    """UserError for keys that SGLang lacks (with the nearest that it has) or that LightRL sets."""
    for name in args:
        if name in OURS:
            raise UserError(f"engine.args.{name}: set by LightRL ({OURS[name]}); remove it")
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"SGLang has {', '.join(sorted(known))}"
            raise UserError(f"engine.args.{name}: SGLang has no such argument; {hint}")


def check_values(args: Mapping[str, Any], types: Mapping[str, str | None]) -> None:
    """UserError for values of another type than the plain one that SGLang states for them."""
    for name, value in args.items():
        kind = types.get(name)
        if kind is not None and (not isinstance(value, _SIMPLE[kind]) or (kind != "bool" and isinstance(value, bool))):
            raise UserError(f"engine.args.{name}: SGLang wants {_WORDS[kind]}, got {value!r}")


def declared() -> dict[str, str | None]:
    """SGLang's arguments as its source declares them, each with its type if that is a plain one; empty where it cannot
    be read, as in a version that puts them elsewhere. The engine's own process checks names in any case."""
    spec = find_spec("sglang")
    for place in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            tree = ast.parse(Path(place, "srt", "server_args.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "ServerArgs" and not node.bases:
                return {
                    field.target.id: _plain(ast.unparse(field.annotation))
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return {}


def _plain(annotation: str) -> str | None:
    """
    >>> [_plain(text) for text in ("int", "A[Optional[str], 'help']", "A[float | None, Arg(help='x')]", "List[int]")]
    ['int', 'str', 'float', None]
    """
    if found := re.match(r"(?:A|Annotated)\[(.*?), ", annotation):
        annotation = found[1]
    if found := re.fullmatch(r"(?:typing\.)?Optional\[(\w+)\]|(\w+) \| None|(\w+)", annotation):
        name = next(part for part in found.groups() if part)
        return name if name in _SIMPLE else None
    return None
