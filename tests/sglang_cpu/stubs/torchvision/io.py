"""Reading images."""

from ._names import __getattr__

__all__ = ["__getattr__"]
