"""The reward terms, one file each: the formula, and nothing else."""
