"""Private implementation of the command ``replicax``; ``python -m replicax --help`` describes it."""
