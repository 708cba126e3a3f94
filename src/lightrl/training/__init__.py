"""The trainer and its parts: policy, packing, optimizer, checkpoints, evaluation."""
