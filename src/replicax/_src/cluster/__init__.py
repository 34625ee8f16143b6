"""Clusters: their tasks and addresses, from the environment or from the user; joining them; failures of other tasks."""
