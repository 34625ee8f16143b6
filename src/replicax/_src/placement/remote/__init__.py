"""Programs placed on other tasks: a scheduled function becomes a worker's program and what it pushes to the servers."""
