"""The process that schedules functions: the queue of closures, the worker pool, and the monitors of tasks."""
