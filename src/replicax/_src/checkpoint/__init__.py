"""Checkpoints: the objects to save, writing and verifying, restoring, and the rules for keeping."""
