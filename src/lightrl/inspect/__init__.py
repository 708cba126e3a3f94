"""Looking at what a run wrote down, and at hooks, without a model: `lightrl inspect`, `replay-reward`, `check-hook`."""
