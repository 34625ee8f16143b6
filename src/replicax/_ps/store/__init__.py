"""The contents of a parameter server: shards, updates, copies and snapshots."""
