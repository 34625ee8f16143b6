"""Datasets of other libraries, read as ``Elements``. Each file knows one library, which it never imports by itself."""
