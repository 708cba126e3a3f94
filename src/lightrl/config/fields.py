"""What the schema says about each key: type, range, default and doc, for checks, messages and the reference."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lightrl.config.kinds import CODE
from lightrl.config.lines import Path
from lightrl.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting, as the reference shows it."""

    section: str
    """`optim`, or `eval.sets` for a key of a table in a list."""
    name: str
    hint: Any
    """Its annotation, `Annotated` included."""
    type: str
    default: str
    """In TOML, or "" when it is unset by default."""
    range: str
    doc: str

    @property
    def full_name(self) -> str:
        return f"{self.section}.{self.name}"


@cache
def sections() -> dict[str, type]:
    """Section name to dataclass, in the order of `Config`."""
    return dict(get_type_hints(Config))


@cache
def hints(section: type) -> dict[str, Any]:
    """Field name to annotation."""
    return get_type_hints(section, include_extras=True)


@cache
def section_docs() -> dict[str, str]:
    """Section name to the docstring of its class; `eval.sets` and the like included."""
    return {name: _one_line(inspect.getdoc(cls) or "") for name, cls in _tables().items()}


@cache
def describe() -> tuple[Key, ...]:
    """Every key of the configuration, section by section, in the order of the schema."""
    docs = _attribute_docs()
    keys = []
    for name, cls in _tables().items():
        for field in dataclasses.fields(cls):
            hint = hints(cls)[field.name]
            keys.append(
                Key(
                    section=name,
                    name=field.name,
                    hint=hint,
                    type=type_name(hint),
                    default=_default(field),
                    range=range_text(hint),
                    doc=docs[cls.__name__].get(field.name, ""),
                )
            )
    return tuple(keys)


def _tables() -> dict[str, type]:
    """Sections, each followed by the tables that its lists hold."""
    tables: dict[str, type] = {}
    for name, cls in sections().items():
        tables[name] = cls
        for key, hint in hints(cls).items():
            item = get_args(bare(hint))[0] if get_origin(bare(hint)) is list else None
            if isinstance(item, type) and dataclasses.is_dataclass(item):
                tables[f"{name}.{key}"] = item
    return tables


def bare(hint: Any) -> Any:
    """The annotation without `Annotated` and without `None`."""
    if get_origin(hint) is Annotated:
        return bare(get_args(hint)[0])
    members = union_members(hint)
    return bare(members[0]) if len(members) == 1 and members[0] is not hint else hint


def union_members(hint: Any) -> list[Any]:
    """Alternatives of a union, `None` left out; the annotation itself when it is no union."""
    if get_origin(hint) in (Union, types.UnionType):
        return [a for a in get_args(hint) if a is not type(None)]
    return [hint]


_NAMES = {bool: "bool", int: "int", float: "float", str: "string"}
_PROSE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_PLURAL = {bool: "booleans", int: "whole numbers", float: "numbers", str: "strings"}


def type_name(hint: Any) -> str:
    """Short, for tables: `list of string`."""
    hint = bare(hint)
    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(type_name(m) for m in members)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(toml(a) for a in args)
    if origin is list:
        item = type_name(args[0])
        return f"list of ({item})" if "|" in item else f"list of {item}"
    if origin is tuple:
        return f"list of {len(args)} {type_name(args[0])}"
    return _NAMES.get(hint, "table")


def type_prose(hint: Any) -> str:
    """For messages: "expected a list of strings"."""
    hint = bare(hint)
    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(type_prose(m) for m in members)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(toml(a) for a in args)
    if origin is list:
        item = bare(args[0])
        return "a list of " + ("names" if get_origin(item) is Literal else _PLURAL.get(item, "tables"))
    if origin is tuple:
        return f"a list of {len(args)} {_PLURAL.get(bare(args[0]), 'values')}"
    return _PROSE.get(hint, "a table")


def range_text(hint: Any) -> str:
    """`> 0 and <= 1`, from the annotations; for a list, the range of its items; "" without one."""
    if get_origin(hint) is Annotated:
        texts = []
        for field in get_args(hint)[1:]:
            for limit in getattr(field, "metadata", []):
                for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                    if hasattr(limit, attribute):
                        texts.append(f"{sign} {getattr(limit, attribute)}")
        return " and ".join(texts)
    members = union_members(hint)
    if len(members) == 1 and members[0] is not hint:
        return range_text(members[0])
    if get_origin(hint) in (list, tuple):
        return range_text(get_args(hint)[0])
    return ""


def hint_at(section: str, path: tuple[str | int, ...]) -> Any:
    """Annotation of a place inside a section (`("betas", 0)`); `Any` where the schema does not look."""
    hint: Any = sections()[section]
    for part in path:
        plain = bare(hint)
        if dataclasses.is_dataclass(plain) and isinstance(plain, type):
            hint = hints(plain).get(str(part), Any)
        elif get_origin(plain) is tuple and isinstance(part, int) and part < len(get_args(plain)):
            hint = get_args(plain)[part]
        elif get_origin(plain) is list:
            hint = get_args(plain)[0]
        else:
            return Any
    return hint


def code_in(value: Any, hint: Any = Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Keys whose value names code (`schema.Code`), with the value, where they are set; in lists and tables too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, inner in hints(type(value)).items():
            yield from code_in(getattr(value, name), inner, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from code_in(item, get_args(bare(hint))[0], (*path, i))
    elif value and any(CODE in getattr(member, "__metadata__", ()) for member in union_members(hint)):
        yield path, value


def toml(value: Any) -> str:
    """A value on one line as TOML writes it (for messages; `lightrl.config.dump` writes files)."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if value is None or isinstance(value, bool | int | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return toml(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "required"
    return "" if field.default is None else toml(field.default)


def _attribute_docs() -> dict[str, dict[str, str]]:
    """Class name to field name to the string that follows the field."""
    docs: dict[str, dict[str, str]] = {}
    files = dict.fromkeys(sys.modules[cls.__module__] for cls in _tables().values())
    for node in (node for file in files for node in ast.parse(inspect.getsource(file)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        docs[node.name] = {key: text for base in bases for key, text in docs.get(base, {}).items()}
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[node.name][field.target.id] = _one_line(after.value.value)
    return docs


def _one_line(text: str) -> str:
    return " ".join(text.split())
