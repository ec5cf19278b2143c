"""Hydra recipes for verl. Found by `--config-name rltr_...` through the search-path plugin."""
