"""Lets the tests here import ``fit_models`` and ``fit_feeds``, which lie beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
