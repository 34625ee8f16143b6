"""Names and texts of other processes and files reach a terminal as text: no escape sequence of theirs acts on it."""

import io

import pytest

from replicax._src.cli.display import Row
from replicax._src.cli.top import View, lines_of
from replicax._src.cluster import failures, progress
from replicax._src.cluster.spec import Task
from replicax._src.drawing.text import printable, printable_lines
from replicax._src.parameter_servers.errors import of_answer

# Clears the screen, sets the title, rings; C1's form of it; ends the line; reverses the order of the text.
NAME = "a\x1b[2J\x1b]0;b\x07\x9b2J\r\n\u202ec\ud800"
SHOWN = r"a\x1b[2J\x1b]0;b\x07\x9b2J\r\n\u202ec\ud800"

TASK = {
    "task": NAME,
    "state": "slow",
    "host": NAME,
    **dict.fromkeys(
        [
            "steps",
            "steps_per_s",
            "examples_per_s",
            "data_share",
            "own_share",
            "num_cpus",
            "restarts",
            "resident_bytes",
            "device_bytes",
            "uptime_s",
            "pid",
        ],
        1,
    ),
    "loss": NAME,
}
STATUS = {"tasks": [TASK]}
PLACE = {"position": 1, "program": NAME, "at": NAME, "callback": NAME, "for_s": 3}


def shown_by_top():
    return "\n".join(lines_of(STATUS))


def told_by_top():
    notes = io.StringIO()
    View(io.StringIO(), notes, {}).note(f"Nobody answers: {NAME}")
    return notes.getvalue()


def shown_by_the_launcher():
    return "\n".join(Row(Task("worker", 0), NAME).cells)


def told_by_progress(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "_speaks", lambda: True)
    progress.say(f"compiling {NAME}")
    return stream.getvalue()


TEXTS = {
    "top": shown_by_top,
    "top's notes": told_by_top,
    "launcher": shown_by_the_launcher,
    "a program's name": lambda: failures.describe_status(PLACE),
    "the next program's name": lambda: failures.describe_status({"next": [3, {"program": NAME}]}),
    "an exchange": lambda: failures.describe_status({"next": [3, {"what": NAME}]}),
    "mismatch": lambda: str(failures.of_mismatch(["worker 0"], [(0, PLACE)])),
    "timeout": lambda: str(
        failures.of_timeout(
            ["worker 0"], {"waiting": [0, PLACE], "waited_s": 3, "is_stuck": False, "named": [[0, PLACE]]}
        )
    ),
    "failed": lambda: str(failures.of_gone(["worker 0"], 0, "failed", NAME, PLACE)),
    "raised": lambda: str(failures.of_gone(["worker 0"], 0, "raised", NAME, PLACE)),
    "a server's error": lambda: str(
        of_answer({"type": NAME, "text": NAME, "details": {"line": NAME}}, "ps 0")
    ),
}


@pytest.mark.parametrize("show", TEXTS.values(), ids=TEXTS)
def test_foreign_text_has_no_control_characters_where_it_is_shown(show):
    text = show()
    assert r"a\x1b[2J" in text
    assert {c for c in text if not c.isprintable()} <= {"\n"}


def test_progress_lines_have_no_control_characters(monkeypatch):
    assert told_by_progress(monkeypatch) == f"replicax: compiling {SHOWN}\n"


def test_printable_text_is_unchanged():
    for text in ("worker 0", "Größe → 3 µs", "名前\u3000全角", "a\xa0b", "/job:worker/task:1"):
        assert printable(text) == printable_lines(text) == text
    assert printable_lines("a\n\tb\x1b") == "a\n    b\\x1b"
