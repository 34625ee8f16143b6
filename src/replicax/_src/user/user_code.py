"""The user's code: which files are the user's, which line runs or failed, and the source of its expression.

User code is everything outside replicax, the standard library and installed packages.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

PACKAGE = str(Path(__file__).parents[2]) + os.sep
UNKNOWN = "an unknown line"

# Nobody's own code, wherever it lies. Names that a user's file may have, such as tree, are not here.
_KNOWN: Final = (
    frozenset(
        {
            "absl",
            "cloudpickle",
            "etils",
            "flax",
            "grain",
            "jax",
            "jaxlib",
            "keras",
            "keras_hub",
            "keras_tuner",
        }
    )
    | {"ml_dtypes", "numpy", "opt_einsum", "optax", "optree", "optuna", "orbax", "scipy", "tensorflow"}
    | {"tensorstore", "torch"}
)
_FOLDERS = ("site-packages", "dist-packages")  # of Python, of a .pth file, of --user, of an outer environment
_PATHS = sysconfig.get_paths()
_LIBRARY = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(_PATHS[name] + os.sep for name in ("purelib", "platlib"))


def is_user_code(filename: str) -> bool:
    """True if a source file is the user's."""
    return not filename.startswith(PACKAGE) and not is_library(filename)


@functools.lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """True if a source file belongs to Python or to an installed package other than replicax.

    An installed package lies in a ``site-packages``, whichever it is. JAX, Keras and others that run the user's
    functions are also found by their modules: a folder of pip's ``--target`` or a checkout may hold them beside
    the user's files.
    """
    if filename.startswith(PACKAGE):
        return False
    return is_standard_library(filename) or _is_installed(filename) or is_of_package(filename, *_KNOWN)


def is_standard_library(filename: str) -> bool:
    """True if a source file belongs to Python itself."""
    return filename.startswith("<frozen") or (filename.startswith(_LIBRARY) and not _is_installed(filename))


def _is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED) or any(f"{os.sep}{name}{os.sep}" in filename for name in _FOLDERS)


def is_of_package(filename: str, *packages: str) -> bool:
    """True if a source file lies in the folder of one of these packages, as they were imported."""
    modules = (sys.modules.get(name) for name in packages)
    folders = (folder for module in modules for folder in getattr(module, "__path__", ()))
    return any(filename.startswith(os.path.abspath(folder) + os.sep) for folder in folders)


def user_line() -> str:
    """``file:line in function`` of the innermost caller that is user code."""
    return _innermost(sys._getframe(1))


def user_line_of_thread(thread_id: int) -> str:
    """The position of a thread: ``file:line in function`` of its innermost user code. It may be called from any
    thread."""
    return _innermost(sys._current_frames().get(thread_id))


def user_line_of_callback() -> str | None:
    """The position of user code that a running program calls; None if it calls none. Call it from any thread.

    JAX calls back on threads that Python did not start, or on the main thread, which then is inside of replicax.
    """
    main = threading.main_thread().ident
    for thread, innermost in sys._current_frames().items():
        codes = [frame.f_code for frame in _frames(innermost)]
        if thread == main:
            codes = list(itertools.takewhile(lambda code: not code.co_filename.startswith(PACKAGE), codes))
        elif codes[-1].co_name == "_bootstrap":  # of `threading`
            continue
        if any(is_user_code(code.co_filename) for code in codes):
            return _innermost(innermost)
    return None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost(frame: FrameType | None) -> str:
    for each in _frames(frame):
        if is_user_code(each.f_code.co_filename):
            return place_of(each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
    return UNKNOWN


def place_of(filename: str, line: int | None, function: str) -> str:
    """Returns ``file:line in function``, the form of places in messages. A cell of a notebook has the name that IPython
    shows, ``Cell In[3]``; its file is a temporary one that users never see.
    """
    shown = _cell_of(filename)
    if shown is not None:
        _files_of_cells[shown] = filename
    return f"{shown or filename}:{line} in {function}"


def source_at(place: str) -> str:
    """Returns the text of the line that a place names; empty if it is not known."""
    found = re.fullmatch(r"(.+):(\d+) in .*", place)
    if found is None:
        return ""
    return linecache.getline(_files_of_cells.get(found[1], found[1]), int(found[2]))


_files_of_cells: dict[str, str] = {}


def ipython_shell() -> Any:
    """Returns the shell of IPython or a notebook that runs the program; None if there is none."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _cell_of(filename: str) -> str | None:
    """Returns the name of the cell whose code has this file name; None if it is no cell's."""
    label_of = getattr(getattr(ipython_shell(), "compile", None), "format_code_name", lambda _: None)
    label = label_of(filename)
    return None if label is None else " ".join(label)


def user_line_of(error: BaseException, otherwise: str = UNKNOWN) -> str:
    """The user's innermost line in an error's traceback; ``otherwise`` if there is none."""
    entry = user_entry(error)
    if entry is None:
        return otherwise
    code = entry.tb_frame.f_code
    return place_of(code.co_filename, entry.tb_lineno, code.co_name)


def user_entry(error: BaseException) -> TracebackType | None:
    """The innermost entry of an error's traceback that is user code; None if there is none."""
    entries = [e for e in frames_of(error.__traceback__) if is_user_code(e.tb_frame.f_code.co_filename)]
    return entries[-1] if entries else None


def frames_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yields the entries of a traceback, from the outermost on."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def expression(frame: FrameType, instruction: int, line: int) -> str:
    """Returns the source of the expression that a frame executes, or of its line if Python does not know."""
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    first, last, start, stop = positions(code, instruction)
    if first is None or last is None or start is None or stop is None or last > len(lines):
        return linecache.getline(code.co_filename, line, frame.f_globals).strip()
    rows = [row.encode() for row in lines[first - 1 : last]]
    rows[-1] = rows[-1][:stop]
    rows[0] = rows[0][start:]
    return b"".join(rows).decode()


def positions(code: CodeType, instruction: int) -> tuple[int | None, ...]:
    """Returns the first and last line of an instruction, and the columns where it starts and ends, in bytes."""
    return next((p for i, p in enumerate(code.co_positions()) if 2 * i == instruction), (None,) * 4)
