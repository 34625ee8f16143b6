"""Plans: published facts of hardware, the costs of a program, and their report."""
