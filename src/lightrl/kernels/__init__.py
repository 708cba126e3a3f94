"""Operators, one a file: a plain-torch reference, then faster forms with the same signature."""
