"""Preemption: when a machine is taken away, all tasks save after the same step and exit."""
