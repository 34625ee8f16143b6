"""Names of other processes reach the terminal of the launcher and of ``replicax top`` as text."""

import io

import pytest

from foreign_text import NAME, shows_no_control_characters
from replicax._launch.display import TaskRow
from replicax._launch.top import StatusView, lines_of
from replicax._src.cluster.spec import Task

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


def shown_by_top():
    return "\n".join(lines_of(STATUS))


def told_by_top():
    notes = io.StringIO()
    StatusView(io.StringIO(), notes, {}).note(f"Nobody answers: {NAME}")
    return notes.getvalue()


def shown_by_the_launcher():
    return "\n".join(TaskRow(Task("worker", 0), NAME).cells)


TEXTS = {"top": shown_by_top, "top's notes": told_by_top, "launcher": shown_by_the_launcher}


@pytest.mark.parametrize("show", TEXTS.values(), ids=TEXTS)
def test_foreign_text_has_no_control_characters_where_it_is_shown(show):
    shows_no_control_characters(show())
