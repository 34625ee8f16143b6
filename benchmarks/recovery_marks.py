"""What the processes of ``recovery.py`` say of themselves: when they have got how far, and with how much CPU time."""

import json
import os
import time

MARKS, FOLDER = "RECOVERY_MARKS", "RECOVERY_FOLDER"
PARTS = ("python", "imports", "join", "restore", "first step")
READY = "ready"
NOT_NEEDED = ("sklearn", "matplotlib")
SIZES, ROWS, SAVE_EVERY, READY_AT = (64, 256, 256, 10), 128, 10, 25


def mark(name, rank, attempt):
    """Says so: one line, written at once."""
    told = {"name": name, "rank": rank, "attempt": attempt, "pid": os.getpid()}
    told |= {"at": time.monotonic(), "cpu": time.process_time()}
    with open(os.environ[MARKS], "a") as file:
        file.write(json.dumps(told) + "\n")
