"""What replicax says in the traces of JAX's profiler."""
