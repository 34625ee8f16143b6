"""Hardware that may be absent: published facts of it, and its devices for compilers. Import from the files."""
