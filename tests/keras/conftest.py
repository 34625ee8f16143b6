"""Lets the tests here import ``fit_models`` and ``fit_feeds`` from this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
