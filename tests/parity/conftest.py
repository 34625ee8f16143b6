"""Lets the tests here import ``parity_cases``, which lies beside them and is shared with ``record.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
