"""Serving the state of a job: ``replicax top``, the page, metrics for Prometheus."""
