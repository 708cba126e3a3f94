"""What a person sees: metrics, trackers, the console, sample dumps and the report."""
