"""Sums of host arrays over processes, in the order of the replicas' numbers."""
