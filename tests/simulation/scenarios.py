"""The scenarios that `make fuzz-simulation` runs, by their names."""

from simulation.survivors import Replacements, Survivors

ALL = {each.__name__: each for each in (Survivors, Replacements)}
