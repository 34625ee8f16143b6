"""``report``: sends values from a task of a ``LocalCluster`` to the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from replicax._src.vocabulary.errors import ContextError

REPORT_FILE_VARIABLE: Final = "REPLICAX_REPORT_FILE"


def report(**values: Any) -> None:
    """Sends values to the test that started this process, which finds them in ``TaskResult.reports``, in order.

    Call it in the script of a task of a ``LocalCluster``, in any context outside of traced functions. Does not block.
    A script that does not import replicax can append lines of JSON to the file ``REPLICAX_REPORT_FILE`` itself.

    Args:
      **values: Values that JSON can hold. Arrays and NumPy numbers become lists and numbers.

    Raises:
      ContextError: No ``LocalCluster`` has started this process.
    """
    path = os.environ.get(REPORT_FILE_VARIABLE)
    if path is None:
        raise ContextError(
            "replicax.testing.report was called in a process that no LocalCluster has started, so no test receives "
            f"the report. Run the script with LocalCluster.start, or set {REPORT_FILE_VARIABLE} to the path of a file."
        )
    line = json.dumps(values, default=lambda value: np.asarray(value).tolist()) + "\n"
    with open(path, "ab", buffering=0) as file:  # a single write, so that lines of several threads do not mix
        file.write(line.encode())


def read_reports(path: Path) -> tuple[dict[str, Any], ...]:
    """Returns all reports until now, without a line that is still being written."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return ()
    return tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n"))
