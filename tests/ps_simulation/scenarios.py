"""The scenarios of parameter servers that `make fuzz-simulation` runs, by their names."""

from ps_simulation.copies import Copies

ALL = {each.__name__: each for each in (Copies,)}
