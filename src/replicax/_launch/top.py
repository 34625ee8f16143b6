"""``replicax top``: shows the tasks of a job, as its chief reports them."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, TextIO, final

from replicax._launch.option_values import seconds
from replicax._launch.terminal import coloured, live_table, write_line
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.machine_layout import STATUS_ADDRESS_VARIABLE
from replicax._src.drawing.text import printable
from replicax._src.status.access import viewing_token
from replicax._src.status.status import (
    BAD_STATES,
    DOUBTFUL_STATES,
    GOOD_STATES,
    columns_of,
    rows_of,
)
from replicax._src.status.summary_lines import summary_lines
from replicax._src.untrusted.strict_json import read_json

_DESCRIPTION: Final = f"""\
Shows a live table of the tasks of a job. The chief (worker 0 without one; with parameter servers the coordinator) serves it
at the address that you choose with {STATUS_ADDRESS_VARIABLE}=127.0.0.1:8080 or `replicax launch --status`. The same address
serves a page for browsers, with curves of the loss and the speed, and /metrics for Prometheus.

data is the share of the last 5 s in which a task waited for its own data, and own the share that it spent in Python or waiting
for its data, while its devices had nothing to do. slow is the task for which the others wait: the one with the largest own
share. The time left is that at the mean speed of this fit, if it runs all its epochs.

A group of rx.experimental.LocalUpdates shows all groups too: the version of the outer parameters, the quorum, the bytes to and
from the syncers, and for each group the rounds since its last push (lag) and its rows in the open round.

A job that no longer answers may be restarting: this command waits for it (--wait). The exit code is 0 when the job has
ended, 1 if nothing answers at the address from the start, and 130 after Ctrl-C.
"""
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 64 << 20
_LEAST_INTERVAL_S: Final = 0.1
_LEFT_OUT_FIRST: Final = ("pid", "up", "function", "host", "cpu", "sent/s", "restarts", "received/s")
_GAP: Final = 2
_BOLD: Final = "1"
# The ANSI codes of states: green, bold yellow, bold red.
_COLOURS: Final = {
    **dict.fromkeys(GOOD_STATES, "32"),
    **dict.fromkeys(DOUBTFUL_STATES, "1;33"),
    **dict.fromkeys(BAD_STATES, "1;31"),
}


def add_parser(subparsers: Any) -> None:
    """Adds the command ``top``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="watch the tasks of a job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help=f"where the chief serves the status: host:port or a URL (default: {STATUS_ADDRESS_VARIABLE})",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="S",
        help=f"seconds between two updates (1), at least {_LEAST_INTERVAL_S}",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for a job that no longer answers, because it may be restarting (60)",
    )
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per update")
    parser.add_argument(
        "--plain", action="store_true", help="print plain lines without colours, even on a terminal"
    )
    parser.set_defaults(run=run, parser=parser)


def _interval(text: str) -> float:
    value = seconds(text)
    if not _LEAST_INTERVAL_S <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds of at least {_LEAST_INTERVAL_S}: frequent requests slow the job down. "
            "--once shows the table once"
        )
    return value


class StatusUnavailable(Exception):
    """The chief did not send a status.

    Attributes:
      is_over: True if no process listens at the address: the job has ended, or never ran there.
    """

    def __init__(self, message: str, *, is_over: bool = False):
        super().__init__(message)
        self.is_over = is_over


def run(options: argparse.Namespace) -> int:
    """Does what the options say; returns the exit code. Ends this process with code 2 if they make no sense."""
    parser: argparse.ArgumentParser = options.parser
    said = options.address or os.environ.get(STATUS_ADDRESS_VARIABLE)
    if not said:
        parser.error(f"which job? Give the address of its status, or set {STATUS_ADDRESS_VARIABLE}")
    try:
        request = request_of(said, os.environ)
    except (ClusterError, ValueError) as error:
        parser.error(str(error))
    is_plain = options.plain or options.once
    view = StatusView(sys.stdout, sys.stderr, os.environ, is_json=options.json, is_plain=is_plain)
    try:
        with contextlib.closing(view):
            return _follow(request, view, options)
    except BrokenPipeError:  # the reader has closed the pipe, so nothing can be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except StatusUnavailable as error:
        print(f"{parser.prog}: {printable(error)}", file=sys.stderr)
        return 1


def _follow(request: urllib.request.Request, view: StatusView, options: argparse.Namespace) -> int:
    view.show(fetch(request))
    over_since = None
    while not options.once:
        time.sleep(options.interval)
        try:
            view.show(fetch(request))
            over_since = None
        except StatusUnavailable as error:
            if not error.is_over:
                view.note(str(error))
                continue
            now = time.monotonic()
            if over_since is None and options.wait:
                view.note("The job does not answer; it may be restarting.")
            over_since = now if over_since is None else over_since
            if now - over_since >= options.wait:
                view.note("The job has ended.")
                return 0
    return 0


def request_of(said: str, environ: Mapping[str, str]) -> urllib.request.Request:
    """Returns the request for the JSON of ``host:port`` or a URL, with the token of the URL or of the cluster.

    Raises:
      ValueError: The address is neither.
      ClusterError: The environment has a wrong token setting.
    """
    url = urllib.parse.urlsplit(said if "://" in said else f"http://{said}")
    if url.scheme not in ("http", "https") or not url.hostname or url.port == 0:
        raise ValueError(f"{said!r} is not the address of a status: write host:port, or http://host:port/")
    path = url.path if url.path.endswith("/") else f"{url.path}/"
    request = urllib.request.Request(f"{url.scheme}://{url.netloc}{path}status.json")
    shown = urllib.parse.parse_qs(url.query).get("token", [None])[0]
    if shown is None:
        token = Credentials.from_environment(environ).token
        shown = None if token is None else viewing_token(token)
    if shown is not None:
        request.add_header("Authorization", f"Bearer {shown}")
    return request


def fetch(request: urllib.request.Request) -> dict[str, Any]:
    """Returns the current status.

    Raises:
      StatusUnavailable: The chief did not send it.
    """
    where = request.full_url.removesuffix("status.json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            status = read_json(answer.read(_MOST_BYTES + 1), most_bytes=_MOST_BYTES)
            lines_of(status)
            return status
    except urllib.error.HTTPError as error:
        text = error.read(1000).decode(errors="replace").strip()
        raise StatusUnavailable(f"{where} answers {error.code}: {text}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        is_over = isinstance(reason, ConnectionError)
        why = f"Nobody answers at {where}: {reason}."
        advice = "Is the program running, with a status address?"
        raise StatusUnavailable(f"{why} {advice}", is_over=is_over) from error
    # No JSON, or not of this form.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise StatusUnavailable(
            f"The program that answers at {where} is not the chief of a replicax job."
        ) from error


# --- how it is shown --------------------------------------------------------------------------------------


@final
class StatusView:
    """Shows statuses in a live table if rich is installed and the output is a terminal, otherwise as lines.

    Args:
      output: The stream for the statuses.
      notes: The stream for messages, if there is no table.
      environment: Describes the terminal.
      is_json: True for one line of JSON per status.
      is_plain: True for no table.
    """

    def __init__(
        self,
        output: TextIO,
        notes: TextIO,
        environment: Mapping[str, str],
        *,
        is_json: bool = False,
        is_plain: bool = False,
    ):
        self._output, self._notes, self._is_json = output, notes, is_json
        self._table = None if is_json or is_plain else live_table(output, environment)

    def show(self, status: Mapping[str, Any]) -> None:
        """Shows a status."""
        if self._table is None:
            for line in [json.dumps(status)] if self._is_json else lines_of(status):
                write_line(self._output, line)
            return
        columns, shown = columns_of(status), columns_within(self._table.width, status)
        rows = [
            (coloured(task, _BOLD), coloured(state, _COLOURS.get(state, "")), *others)
            for task, state, *others in rows_of(status)
        ]
        heads = [*summary_lines(status), ""]
        names = [columns[number].name for number in shown]
        num_left = sum(columns[number].is_text for number in shown)
        self._table.draw(heads, names, [[row[n] for n in shown] for row in rows], num_left)

    def note(self, text: str) -> None:
        """Shows a message."""
        text = printable(text)
        if self._table is None:
            print(text, file=self._notes)
        else:
            self._table.print(coloured(text, _BOLD))

    def close(self) -> None:
        """Ends the view. Its last content stays visible."""
        if self._table is not None:
            self._table.close()


def columns_within(width: int, status: Mapping[str, Any]) -> list[int]:
    """Returns the columns that fit into a width in characters. Less important columns are left out first."""
    names = [column.name for column in columns_of(status)]
    widths = [max(map(len, column)) for column in zip(names, *rows_of(status), strict=True)]
    shown = list(range(len(names)))
    for name in _LEFT_OUT_FIRST:
        if name in names and sum(widths[number] + _GAP for number in shown) - _GAP > width:
            shown.remove(names.index(name))
    return shown


def lines_of(status: Mapping[str, Any]) -> list[str]:
    """Returns a status as lines; the last one is empty."""
    columns = columns_of(status)
    rows = [[column.name for column in columns], *rows_of(status)]
    widths = [
        f"{'<' if column.is_text else '>'}{max(len(row[number]) for row in rows)}"
        for number, column in enumerate(columns)
    ]
    lines = [(" " * _GAP).join(map(format, row, widths)).rstrip() for row in rows]
    return [*summary_lines(status), *lines, ""]
