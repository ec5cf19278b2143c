"""The completeness checker and its backends."""
