"""Names and texts of other processes and files reach a terminal as text: no escape sequence of theirs acts on it."""

import io

import pytest

from foreign_text import NAME, SHOWN, shows_no_control_characters
from replicax._src.cluster import failures, progress
from replicax._src.drawing.text import printable, printable_lines

PLACE = {"position": 1, "program": NAME, "at": NAME, "callback": NAME, "for_s": 3}


def told_by_progress(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "_speaks", lambda: True)
    progress.say(f"compiling {NAME}")
    return stream.getvalue()


TEXTS = {
    "a program's name": lambda: failures.describe_status(PLACE),
    "the next program's name": lambda: failures.describe_status({"next": [3, {"program": NAME}]}),
    "an exchange": lambda: failures.describe_status({"next": [3, {"what": NAME}]}),
    "mismatch": lambda: str(failures.mismatch_error(["worker 0"], [(0, PLACE)])),
    "timeout": lambda: str(
        failures.timeout_error(
            ["worker 0"], {"waiting": [0, PLACE], "waited_s": 3, "is_stuck": False, "named": [[0, PLACE]]}
        )
    ),
    "failed": lambda: str(failures.gone_error(["worker 0"], 0, "failed", NAME, PLACE)),
    "raised": lambda: str(failures.gone_error(["worker 0"], 0, "raised", NAME, PLACE)),
}


@pytest.mark.parametrize("show", TEXTS.values(), ids=TEXTS)
def test_foreign_text_has_no_control_characters_where_it_is_shown(show):
    shows_no_control_characters(show())


def test_progress_lines_have_no_control_characters(monkeypatch):
    assert told_by_progress(monkeypatch) == f"replicax: compiling {SHOWN}\n"


def test_printable_text_is_unchanged():
    for text in ("worker 0", "Größe → 3 µs", "名前\u3000全角", "a\xa0b", "/job:worker/task:1"):
        assert printable(text) == printable_lines(text) == text
    assert printable_lines("a\n\tb\x1b") == "a\n    b\\x1b"
