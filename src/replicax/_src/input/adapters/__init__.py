"""One file for each kind of dataset: it describes a dataset, and opens it as ``Elements``. A file for another library
does not import it.
"""
