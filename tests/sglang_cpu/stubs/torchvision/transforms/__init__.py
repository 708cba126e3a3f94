"""Changing images."""

from .._names import __getattr__
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "__getattr__"]
