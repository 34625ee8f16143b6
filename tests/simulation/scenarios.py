"""The scenarios that `make fuzz-simulation` runs, by their names. Those of a part are there if its tests are."""

import importlib.util

from simulation.survivors import Replacements, Survivors

ALL = {each.__name__: each for each in (Survivors, Replacements)}

if importlib.util.find_spec("ps_simulation") is not None:  # the core's tree lacks it
    ALL |= importlib.import_module("ps_simulation.scenarios").ALL
