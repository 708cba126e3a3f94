"""Tools that a model calls: their definitions, how calls are read from its text, and their limits."""

from lightrl.rollout.tools.base import Called, Tool, ToolBox, ToolError, load_tools
from lightrl.rollout.tools.parsers import Call, Parser, load_parser

__all__ = ["Call", "Called", "Parser", "Tool", "ToolBox", "ToolError", "load_parser", "load_tools"]
