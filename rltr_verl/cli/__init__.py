"""The `rltr` command."""
