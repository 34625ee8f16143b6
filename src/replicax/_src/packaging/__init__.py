"""The package itself: its version, its optional dependencies, where it is published."""
