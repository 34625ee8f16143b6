"""``replicax migrate``: a table of names, and the rewriting of modules and notebooks with it."""
