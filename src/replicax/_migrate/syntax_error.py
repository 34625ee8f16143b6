"""A file that is no Python 3: Python's own words for the error, and what to do about a file of Python 2."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

# What Python 2 has and Python 3 has not. A line that does not parse and has one of these is Python 2.
_PYTHON_2: Final = re.compile(
    r"""^\s*(?:print|exec)\s+[^\s=(.,\[]          # print "loss", loss
    |^\s*print\s*>>                              # print >>sys.stderr, loss
    |^\s*print\s*\(.*\)\s*%                      # print ("%f") % loss
    |^\s*except\s+[\w.()\s,]+,\s*\w+\s*:         # except IOError, error:
    |^\s*raise\s+[\w.]+\s*,                      # raise ValueError, "text"
    |<>
    |`[^`]*`                                     # `x` is repr(x)
    |\b(?:0[xX][0-9a-fA-F]+|\d+)[lL]\b           # 10L
    |(?<![\w.])0\d+\b                            # 0777
    |\b[uU][rR]['"]
    """,
    re.VERBOSE,
)


def words_of(code: bytes | str, name: str) -> str | None:
    """Returns the line of the first syntax error, what Python says of it, and what to do; None if Python reads it.

    Args:
      code: The text of the file, or of a notebook's cells.
      name: The name of the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError) as error:
        if not isinstance(error, SyntaxError) or error.lineno is None:
            return None
        text = error.msg.rstrip(".")
        said = f"line {error.lineno}: {text}{'' if text.endswith('?') else '.'}"
        if _PYTHON_2.search(error.text or ""):
            how = f" (2to3 -w {name}, which Python 3.12 and older have)" if name.endswith(".py") else ""
            said += f" The line is Python 2: convert the file to Python 3 first{how}, then run replicax migrate again."
        return said
    return None
