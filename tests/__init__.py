"""Tests; a package, since another distribution installs one of this name, which would hide ours from ``-m``."""
