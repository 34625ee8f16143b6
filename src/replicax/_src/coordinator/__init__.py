"""The coordinator of parameter servers: which worker runs which scheduled function, and what comes of it."""
