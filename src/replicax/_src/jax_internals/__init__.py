"""All that depends on JAX's version or its private names."""
