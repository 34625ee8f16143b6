"""Lets the tests here import ``parity_cases`` from this folder, which ``record.py`` uses too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
