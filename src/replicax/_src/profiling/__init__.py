"""The names that replicax adds to traces of JAX's profiler."""
