"""The marks that processes of ``recovery.py`` write: how far they are, when, and with how much CPU time."""

import json
import os
import time

MARKS, FOLDER = "RECOVERY_MARKS", "RECOVERY_FOLDER"
PARTS = ("python", "imports", "join", "restore", "first step")
READY = "ready"
NOT_NEEDED = ("sklearn", "matplotlib")
SIZES, ROWS, SAVE_EVERY, READY_AT = (64, 256, 256, 10), 128, 10, 25


def mark(name, rank, attempt):
    """Writes one mark as a line, at once."""
    told = {"name": name, "rank": rank, "attempt": attempt, "pid": os.getpid()}
    told |= {"at": time.monotonic(), "cpu": time.process_time()}
    with open(os.environ[MARKS], "a") as file:
        file.write(json.dumps(told) + "\n")
