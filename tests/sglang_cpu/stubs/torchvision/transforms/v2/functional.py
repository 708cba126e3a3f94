"""Changing images, anew."""

from ..functional import InterpolationMode, __getattr__

__all__ = ["InterpolationMode", "__getattr__"]
