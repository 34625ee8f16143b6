"""Turns a program over a global batch into one that each replica runs on its own rows."""
