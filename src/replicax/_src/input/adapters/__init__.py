"""Datasets of other libraries, read as ``Elements``. Each file is for one library and does not import it."""
