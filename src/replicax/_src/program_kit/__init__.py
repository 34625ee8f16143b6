"""The program kit: all that parameter servers take from the core."""
