"""Measures of how the code hangs together: what ``tools/seams.py`` counts."""
