"""Lets the tests here import ``migrated`` and ``table_examples`` from this folder; the second is also a script for
TensorFlow."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
