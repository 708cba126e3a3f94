"""Settings of a run: typed sections, TOML files, command-line overrides."""
