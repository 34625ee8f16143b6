"""Private implementation; import the public names from ``replicax``."""
