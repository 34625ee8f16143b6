"""Input: sources of batches, the rule that cuts them, and distributed datasets."""
