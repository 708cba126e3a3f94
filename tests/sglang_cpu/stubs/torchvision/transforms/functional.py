"""Changing images."""

from enum import Enum

from .._names import __getattr__


class InterpolationMode(Enum):
    """transformers makes a table of these."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__all__ = ["InterpolationMode", "__getattr__"]
