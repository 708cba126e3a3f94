"""Errors that are the user's to fix."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input: the message names the key, file:line or sample, and the fix. The command line exits with 2."""
