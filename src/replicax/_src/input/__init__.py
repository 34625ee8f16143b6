"""Input: sources of batches, the rule that splits them, and distributed datasets."""
