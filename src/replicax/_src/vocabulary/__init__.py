"""The words that every layer shares: errors and options."""
