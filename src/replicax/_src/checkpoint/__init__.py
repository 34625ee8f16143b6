"""Checkpoints: what is saved, how it is written and verified, how it is restored, and which ones are kept."""
