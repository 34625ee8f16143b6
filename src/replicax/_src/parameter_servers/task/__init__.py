"""One process of a cluster: what it answers, for whom, and how it is set up."""
