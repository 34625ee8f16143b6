"""The start of the command ``replicax``: Ctrl-C ends it without a traceback, and closed standard streams are opened.

Imports only what Python has loaded at its start, so that it is imported at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

INTERRUPTED_EXIT_CODE = 130
UNREAD_EXIT_CODE = 141


class EndingAtInterrupt:
    """Ends the command ``replicax`` at Ctrl-C with exit code 130 while the block runs. Has no effect in other programs.

    The imports of the command take up to a second; KeyboardInterrupt would print a traceback of one of them.
    """

    def __enter__(self) -> None:
        is_command = any(os.path.basename(word) == "replicax" for word in sys.orig_argv[1:])
        self._is_mine = is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_mine:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED_EXIT_CODE))

    def __exit__(self, *error: object) -> None:
        if self._is_mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def full_disk(error: OSError) -> str:
    """Returns why a stream cannot be written, if its disk has no room; otherwise an empty string."""
    return {
        errno.ENOSPC: "its disk is full",
        errno.EDQUOT: "the quota of its disk is used up",
        errno.EFBIG: "the file would exceed its size limit (ulimit -f)",
    }.get(error.errno or 0, "")


def exit_code_of_output(error: OSError) -> int | None:
    """Returns the exit code for an error of standard output, after a message on standard error if its disk is full.

    Returns None for another error. A closed pipe needs no message: its reader has what it wanted.
    """
    full = full_disk(error)
    if error.filename is not None or not (full or isinstance(error, BrokenPipeError)):
        return None
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())  # Python flushes what is left at exit
    if not full:
        return UNREAD_EXIT_CODE
    print(
        f"replicax: standard output cannot be written: {full}. Free some space, or write elsewhere.",
        file=sys.stderr,
    )
    return 1


def open_closed_streams() -> None:
    """Connects standard streams that are closed (``>&-``, some daemons and cron jobs) to the null device.

    Python has None in place of such a stream, and the next file that a process opens would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _null_stream(number))


def _null_stream(number: int) -> object:
    opened = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(number)
    except OSError:  # it is free
        os.dup2(opened, number)
    if opened > 2:
        os.close(opened)
    else:
        os.set_inheritable(opened, True)
    return open(os.devnull, "w" if number else "r")
