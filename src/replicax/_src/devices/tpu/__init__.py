"""Where the cores of TPUs are, and which of them are one replica. Pure, without JAX. Import from the files."""
