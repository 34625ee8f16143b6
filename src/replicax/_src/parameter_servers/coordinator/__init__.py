"""The process that schedules functions: the queue, the pool of workers, and what it watches."""
