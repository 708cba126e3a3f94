"""Kinds of values that settings have, with their ranges."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=10**7)]
CODE = "names code"
Code = Annotated[str, CODE]
"""A rule, or `package.module:function`: the command line looks for it before anything starts."""
Faults = list[tuple[str, str]]
"""What functions `of_…` find: (key, what is wrong and what to do) for each rule that does not hold."""
