"""What a parameter server holds: pieces, updates, copies and snapshots."""
