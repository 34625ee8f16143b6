"""Checks of what other programs and users write: JSON, and the owners of files."""
