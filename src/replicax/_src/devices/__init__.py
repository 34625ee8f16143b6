"""Hardware that may not be here: published facts of it, and its devices for compilers. Import from the files."""
