"""Only names: SGLang and transformers import image functions that a language model never calls."""

from . import io, transforms
from ._names import __getattr__

__version__ = "0.0.0"
__all__ = ["__getattr__", "io", "transforms"]
