"""The positions of TPU cores, and the cores of each replica. Pure, without JAX. Import from the files."""
