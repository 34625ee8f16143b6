"""Frameworks whose objects programs use."""
