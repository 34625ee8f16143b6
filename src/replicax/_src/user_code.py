"""Decides which code is the user's: everything outside replicax, the standard library and installed packages."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SKIPPED = (
    PACKAGE,
    "<frozen",
    *(
        path + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "purelib", "platlib")
    ),
)
_PATHS = sysconfig.get_paths()
_LIBRARY = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(_PATHS[name] + os.sep for name in ("purelib", "platlib"))
UNKNOWN = "an unknown line"


def is_user_code(filename: str) -> bool:
    """True if a source file is the user's."""
    return not filename.startswith(_SKIPPED)


def is_standard_library(filename: str) -> bool:
    """True if a source file belongs to Python itself."""
    return filename.startswith("<frozen") or (
        filename.startswith(_LIBRARY) and not filename.startswith(_INSTALLED)
    )


def user_line() -> str:
    """``file:line in function`` of the innermost caller that is user code."""
    return _innermost(sys._getframe(1))


def user_line_of_main_thread() -> str:
    """The position of the main thread: ``file:line in function`` of its innermost user code. It may be called from any
    thread."""
    return _innermost(sys._current_frames().get(threading.main_thread().ident or 0))


def _innermost(frame: FrameType | None) -> str:
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return UNKNOWN


def user_line_of(error: BaseException) -> str:
    """The user's innermost line in an error's traceback."""
    found = UNKNOWN
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_code(code.co_filename):
            found = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found
