"""The contents of a parameter server: pieces, updates, copies and snapshots."""
