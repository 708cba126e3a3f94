"""Advantages, losses, KL: pure functions on tensors, one formula each (docs/algorithms.md)."""
