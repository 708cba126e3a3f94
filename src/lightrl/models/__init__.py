"""Hugging Face models: loading, patching, export."""
