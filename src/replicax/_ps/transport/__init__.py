"""Requests and messages between tasks, over the wire."""
