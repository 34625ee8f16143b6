"""Makes the programs of this folder importable, and the models of the tests of Keras."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "keras"))  # for fit_models
