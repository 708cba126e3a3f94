"""Functions of the user's own, named in the config as `package.module:function`."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from lightrl.errors import UserError

# Where a module's source uses one of these, only running it tells which names it has.
_DYNAMIC = {"exec", "globals", "locals", "vars"}


def load(path: str, key: str, *, arguments: int | None = 1) -> Callable[..., Any]:
    """Import `package.module:function`. The working directory is importable.

    With `arguments = None` it may take any. `key` is the config key the path came from. Raises UserError when it cannot
    be imported or is not callable.
    """
    module_name, _, name = path.partition(":")
    if not _well_formed(path):
        raise UserError(f"{key} = {path!r}: write a function as package.module:function")
    here = _look_here()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(f"{key} = {path!r}: {fault(path) or _no_module(error.name, here)}") from error
        raise UserError(f"{key} = {path!r}: {module_name} imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises, or a script that ends itself
        text = " ".join(str(error).split())[:300]
        raise UserError(f"{key} = {path!r}: importing {module_name} raised {type(error).__name__}: {text}") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{key} = {path!r}: {_no_name(module_name, name, vars(module))}")
    if not callable(function):
        raise UserError(f"{key} = {path!r}: {_no_function(name, function)}")
    if arguments is not None and (wrong := call_fault(function)) is not None:
        raise UserError(f"{key} = {path!r}: {wrong}")
    return function


def call(function: Callable[..., Any], argument: Any, path: str, key: str) -> Any:
    """What a function that `load` found returns; UserError, with its own frames as a note, where it raises."""
    try:
        return function(argument)
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        mistake = UserError(f"{key} = {path!r}: it raised {type(error).__name__}" + (f": {text}" if text else ""))
        frames = error.__traceback__ and error.__traceback__.tb_next  # without this one
        if frames is not None:
            mistake.add_note("".join(traceback.format_exception(type(error), error, frames)).rstrip())
        raise mistake from error


def call_fault(function: Callable[..., Any]) -> str | None:
    """Why a function cannot be called with one argument, as those named in the config are; else None."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some of C's have none
        return None
    try:
        signature.bind(None)
    except TypeError:
        return _takes(getattr(function, "__name__", "the function"), str(signature))
    return None


def fault(path: str, *, arguments: int | None = 1) -> str | None:
    """Why `load` will not find `package.module:function`, as far as can be told without running code; else None.

    No module is imported: it may import torch, or want a GPU. It must exist, and its source define the name at top
    level. What names a module has may be known only once it runs; then this says None, and `load` has the last word.
    """
    module_name, _, name = path.partition(":")
    if not _well_formed(path):
        return f"{path!r}: write a function as package.module:function"
    here = _look_here()
    loaded = sys.modules.get(module_name)
    if loaded is not None:
        known = vars(loaded)
        if name in known:
            return None if callable(known[name]) else _no_function(name, known[name])
        return None if "__getattr__" in known else _no_name(module_name, name, known)
    spec: ModuleSpec | None = None
    parts = module_name.split(".")
    for length in range(1, len(parts) + 1):
        around, found = spec, ".".join(parts[:length])
        spec = _find(found, around)
        if spec is None:
            return None if around is not None and _makes_modules(around) else _no_module(found, here, around)
    assert spec is not None, "a path has at least one part"
    return _fault_in(spec, name, arguments)


def _well_formed(path: str) -> bool:
    module_name, _, name = path.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))


def _look_here() -> str:
    """Make the working directory importable and return it: a script installed by pip does not have it on its path."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return here


def _find(name: str, around: ModuleSpec | None) -> ModuleSpec | None:
    """As importlib's `find_spec`, which imports the packages `around` a module to find it."""
    if around is None:
        try:
            return find_spec(name)
        except ValueError:  # a module made by hand
            return None
    portions: list[str] = []
    for place in around.submodule_search_locations or ():
        finder: Any = pkgutil.get_importer(place)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        if spec is not None:
            portions += spec.submodule_search_locations or ()
    if not portions:
        return None
    folder = ModuleSpec(name, None, is_package=True)  # without an __init__.py
    folder.submodule_search_locations = portions
    return folder


def _source(spec: ModuleSpec) -> str | None:
    """None if there is none to read, as of compiled modules."""
    if spec.loader is None:
        return ""
    try:
        return spec.loader.get_source(spec.name) if hasattr(spec.loader, "get_source") else None
    except (ImportError, OSError):  # not text, or not readable: importing it will say so
        return None


def _makes_modules(package: ModuleSpec) -> bool:
    """Whether a package may have modules that no file of its folder shows."""
    source = _source(package)
    return source is None or "__path__" in source or "sys.modules" in source


def _fault_in(spec: ModuleSpec, name: str, arguments: int | None) -> str | None:
    source = _source(spec)
    if source is None:
        return None
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return f"{spec.name} cannot be imported: {spec.origin}:{error.lineno}: {error.msg}; correct it"
    except (ValueError, RecursionError, MemoryError):
        return None
    names = _names(tree)
    if names is None:
        return None
    if name not in names:
        return _no_name(spec.name, name, names)
    return _literal(tree, name) or (None if arguments is None else _unfit(tree, name))


def _unfit(tree: ast.Module, name: str) -> str | None:
    """As `call_fault`, of a name that a plain `def` at top level binds and nothing else does."""
    found = [node for node in ast.walk(tree) if name in _bound_by(node)]
    if len(found) != 1 or found[0] not in tree.body:
        return None
    (node,) = found
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    given = node.args
    positional = len(given.posonlyargs) + len(given.args)
    fits = (positional or given.vararg) and positional - len(given.defaults) <= 1 and None not in given.kw_defaults
    return None if fits else _takes(name, f"({ast.unparse(given)})")


def _bound_by(node: ast.AST) -> set[str]:
    """Names that this node alone binds, in whatever scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.Global):
        return set(node.names)
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del) else set()


def _takes(name: str, arguments: str) -> str:
    return f"{name}{arguments} cannot be called with one argument, as it will be"


def _names(tree: ast.Module) -> set[str] | None:
    """Names that a module's top level binds, in `if`, `try` and the like too; None if only running it would tell."""
    names: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    everywhere = list(ast.walk(tree))
    names |= {name for node in everywhere if isinstance(node, ast.Global) for name in node.names}
    used = {node.id for node in everywhere if isinstance(node, ast.Name)}
    used |= {ast.unparse(node) for node in everywhere if isinstance(node, ast.Attribute) and node.attr == "modules"}
    return None if {"*", "__getattr__"} & names or (_DYNAMIC | {"sys.modules"}) & used else names


def _literal(tree: ast.Module, name: str) -> str | None:
    """What to say of a name whose only value is written out, such as `LIMIT = 3`; None for any other."""
    bound = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            bound += node.id == name and isinstance(node.ctx, ast.Store)
        else:
            others = getattr(node, "name", None), getattr(node, "asname", None), *getattr(node, "names", ())
            bound += name in others
    for node in tree.body if bound == 1 else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return _no_function(name, ast.literal_eval(node.value))
    return None


def _no_function(name: str, value: object) -> str:
    return f"{name!r} is of type {type(value).__name__}, not a function"


def _no_module(name: str, here: str, around: ModuleSpec | None = None) -> str:
    package, _, last = name.rpartition(".")
    places = None if around is None else list(around.submodule_search_locations or ())
    near = difflib.get_close_matches(last, [m.name for m in pkgutil.iter_modules(places)], n=1)
    close = f"{package}.{near[0]}" if near and package else "".join(near)
    hint = f"did you mean {close!r}?" if close else "run from its folder, or install it"
    return f"no module {name!r} in {here} or among the installed packages: {hint}"


def _no_name(module_name: str, name: str, known: Iterable[str]) -> str:
    public = [n for n in known if not n.startswith("_")]
    close = difflib.get_close_matches(name, public, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(public)[:8]) or 'no names'}"
    return f"{module_name} has no {name!r} ({hint})"
