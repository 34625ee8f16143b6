"""Private implementation of the command ``replicax``; ``python -m replicax --help`` says what it does."""
