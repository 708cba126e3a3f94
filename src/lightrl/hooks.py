"""Functions of the user's own, named in the config as `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lightrl.errors import UserError


def load(path: str, key: str) -> Callable[..., Any]:
    """Import `package.module:function`. The working directory is importable.

    `key` is the config key the path came from. Raises UserError when it cannot be imported or is not callable.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not name.isidentifier():
        raise UserError(f"{key} = {path!r}: write a function as package.module:function")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # a script installed by pip does not have it; `python -m` does
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"{key} = {path!r}: no module {error.name!r} in {here} or among the installed packages"
            ) from error
        raise UserError(f"{key} = {path!r}: {module_name} imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises, or a script that ends itself
        text = " ".join(str(error).split())[:300]
        raise UserError(f"{key} = {path!r}: importing {module_name} raised {type(error).__name__}: {text}") from error
    function = getattr(module, name, None)
    if function is None:
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"{key} = {path!r}: {module_name} has no {name!r}{hint}")
    if not callable(function):
        raise UserError(f"{key} = {path!r}: {name!r} is a {type(function).__name__}, not a function")
    return function
