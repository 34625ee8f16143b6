"""Lets the tests here import ``table_examples`` from this folder, which is also a script for TensorFlow."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
