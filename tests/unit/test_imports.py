"""Who may import whom (docs/architecture.md), read from the source; and the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightrl

PACKAGE = Path(lightrl.__file__).parent
RECORDS = "lightrl.errors lightrl.types lightrl.threads"
SECTION = f"{RECORDS} lightrl.config.schema"
LIBRARY = (
    "lightrl.algorithms lightrl.config lightrl.data lightrl.distributed lightrl.engine.base lightrl.errors "
    "lightrl.hooks lightrl.kernels lightrl.models lightrl.wrappers lightrl.observe lightrl.rewards lightrl.rollout "
    "lightrl.sync lightrl.types"
)
# Room (the longest prefix of a module counts): what it may import anywhere | what only inside functions or for types.
# Each room may import itself; the standard library is free.
RULES = {
    # the lazy names
    "": " | lightrl.config lightrl.errors lightrl.rollout.hooked lightrl.training lightrl.types",
    "__main__": "lightrl.cli |",
    "cli": "typer lightrl.errors lightrl.ending lightrl.threads lightrl.cli_looking lightrl.cli_places "
    "lightrl.cli_serve | lightrl",
    "cli_places": "lightrl.errors | lightrl",
    "cli_looking": "typer lightrl.errors | rich lightrl",
    "cli_serve": "typer lightrl.ending lightrl.threads | lightrl",
    "ending": "lightrl.errors | torch.distributed.elastic",
    "doctor": "| rich torch lightrl.training.policy lightrl.engine.sglang_versions",
    "errors": "|",
    "hooks": "lightrl.errors |",
    "threads": "|",
    "wrappers": "|",
    "types": "torch |",
    "config": "pydantic pydantic_core lightrl.errors | tomlkit",  # never torch: mistakes answer at once
    "kernels": "torch triton | flash_attn",
    "algorithms": "torch lightrl.types lightrl.kernels |",
    "training.packing": "torch lightrl.types lightrl.training.balance |",
    "training.balance": "torch |",
    "models": "torch transformers safetensors huggingface_hub numpy lightrl.errors lightrl.types lightrl.wrappers "
    "lightrl.kernels | fla filelock gguf peft tokenizers lightrl.data.tasks",
    "distributed": f"torch {SECTION} lightrl.wrappers |",
    "sync": f"torch safetensors {SECTION} lightrl.engine.base lightrl.distributed |",
    "observe": f"torch rich {SECTION} | matplotlib wandb",
    "data": f"numpy {SECTION} lightrl.hooks | datasets pyarrow transformers",
    "rewards": f"{SECTION} lightrl.hooks | math_verify torch transformers",
    "engine": f"torch transformers {SECTION} lightrl.kernels lightrl.models lightrl.wrappers |",
    "engine.sglang": f"torch {SECTION} lightrl.distributed.waiting lightrl.engine lightrl.sync |",
    "engine.remote": f"torch {SECTION} lightrl.engine lightrl.sync |",
    "engine.sglang_server": f"torch {SECTION} lightrl.engine lightrl.sync |",
    "engine.sglang_host": "lightrl.errors lightrl.engine.sglang_answers lightrl.engine.sglang_arguments "
    "lightrl.engine.frames lightrl.engine.sglang_versions | sglang",
    "engine.sglang_arguments": "lightrl.errors lightrl.engine.sglang_versions |",
    "engine.sglang_answers": "|",
    "engine.sglang_versions": "|",
    "engine.sglang_receiver": "torch lightrl.sync lightrl.engine |",
    "engine.sglang_rehearsal": "torch lightrl.sync lightrl.engine |",
    "engine.sglang_copies": "torch |",
    "engine.sglang_derived": "torch |",
    "rollout": f"torch {SECTION} lightrl.engine.base lightrl.distributed lightrl.rewards lightrl.data lightrl.hooks |",
    "rollout.endpoint": "h11 lightrl.config.schema lightrl.engine.base lightrl.errors lightrl.hooks lightrl.rewards "
    "lightrl.rollout lightrl.types |",
    "rollout.tools.parsers": f"{SECTION} | sglang",
    "inspect": "torch rich lightrl.config lightrl.data lightrl.engine.base lightrl.errors lightrl.hooks "
    "lightrl.observe lightrl.rewards lightrl.rollout lightrl.training.hooks lightrl.types | tokenizers transformers",
    "training": f"torch transformers safetensors numpy {LIBRARY} lightrl.threads | lightrl.engine filelock",
}
# torchrun's variables; SGLang's; its servers' key, an evaluator's; the endpoint's, and what its agents
# inherit; who prints an error before torch; OMP_WAIT_POLICY.
MAY_READ_ENVIRONMENT = {
    *(
        "distributed/mesh.py",
        "engine/sglang.py",
        "engine/sglang_start.py",
        "engine/sglang_server.py",
        "rollout/endpoint/outside.py",
        "training/outside_eval.py",
        "ending.py",
        "doctor.py",
        "threads.py",
    )
}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def imports(node: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    """(full name, whether it is imported inside a function or for type checkers only)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            yield from ((f"{child.module}.{alias.name}", late) for alias in child.names)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from imports(child, late or inside or types_only)


def below(name: str, prefixes: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("file", FILES)
def test_imports_stay_in_their_room(file: str) -> None:
    module = file.removesuffix(".py").removesuffix("__init__").replace("/", ".").strip(".")
    room = max((room for room in RULES if room == "" or below(module, [room])), key=len)
    assert module in ("", "__init__") or room, f"{module} has no room: give it one in RULES"
    early, late = (part.split() for part in RULES[room].split("|"))
    own = [f"lightrl.{room}" if room else "lightrl.__version__"]
    for name, is_late in imports(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if name.split(".")[0] not in sys.stdlib_module_names:
            allowed = own + early + (late if is_late else [])
            assert below(name, allowed), f"{file} imports {name}{' late' if is_late else ''}; allowed: {allowed}"


@pytest.mark.parametrize("file", FILES)
def test_no_globals_and_environment_in_few_places(file: str) -> None:
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: global statement"
        reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
        reads |= isinstance(node, ast.ImportFrom) and node.module == "os" and "environ" in ast.unparse(node)
        if reads and file not in MAY_READ_ENVIRONMENT:
            pytest.fail(f"{file}:{node.lineno}: reads the environment")


def test_public_names() -> None:
    assert sorted(lightrl.__all__) == sorted({*lightrl._HOMES, "__version__"})
    for name in lightrl.__all__:
        value = getattr(lightrl, name)
        assert name == "__version__" or value.__name__ == name
    assert set(lightrl.__all__) <= set(dir(lightrl))
    with pytest.raises(AttributeError, match="'lightrl' has no attribute 'trainer_'"):
        _ = lightrl.trainer_


def test_import_is_light() -> None:
    check = "import sys, lightrl; print({'torch', 'transformers', 'pydantic', 'typer'} & set(sys.modules))"
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
