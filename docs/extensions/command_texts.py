"""What ``replicax launch --help`` and its like print."""

import contextlib
import io
import os

from replicax.__main__ import main

COLUMNS = "84"


def help_of(command: str) -> str:
    """What a command of ``replicax`` prints with ``--help``."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS  # argparse wraps its lines to it
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command.split()[1:], "--help"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return printed.getvalue()
