"""Clusters: who is in them and at which address, found in the environment or said by the user."""
