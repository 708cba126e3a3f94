"""Prompts: read, rendered, tokenized, and dealt out in an order that survives restarts."""

from lightrl.data.errors import DataError
from lightrl.data.prompts import PromptSet, load_prompts
from lightrl.data.source import PromptSource

__all__ = ["DataError", "PromptSet", "PromptSource", "load_prompts"]
