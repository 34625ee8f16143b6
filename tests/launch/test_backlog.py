"""What waits to be shown is bounded, and whoever adds to it never waits. No processes, no terminals."""

import threading

from replicax._launch.backlog import Backlog, WaitingLine
from replicax._src.cluster.spec import Task

WORKER = Task("worker", 0)
LIMIT_S = 50


def texts(entries):
    return [entry.text for entry in entries]


def test_all_that_waits_is_taken_at_once_in_order():
    backlog = Backlog()
    for line in ("a", "", "b"):
        backlog.add(WaitingLine(line, WORKER))
    assert texts(backlog.take()) == ["a", "", "b"]
    assert not backlog.rest()


def test_tasks_wait_from_the_first_bound_on_and_lines_are_dropped_and_counted_from_the_second():
    backlog = Backlog(held_at=1000, dropped_at=3000)
    for number in range(1000):
        backlog.add(WaitingLine(str(number), WORKER))
        assert backlog.is_full == (number >= 9)  # each line counts as 100 characters more
    backlog.add(WaitingLine("worker 0 has failed"))  # a message of the launcher is never dropped
    *lines, message, missing = texts(backlog.take())
    assert lines == [str(number) for number in range(29)]
    assert message == "worker 0 has failed"
    assert missing.startswith("971 lines are missing here")
    assert not backlog.is_full
    backlog.add(WaitingLine("next", WORKER))
    assert texts(backlog.take()) == ["next"]


def test_take_waits_and_returns_none_after_close_when_all_is_taken():
    backlog, taken, has_ended = Backlog(), [], threading.Event()

    def take():
        while (entries := backlog.take()) is not None:
            taken.append(texts(entries))
        has_ended.set()

    threading.Thread(target=take, daemon=True).start()
    backlog.add(WaitingLine("a"))
    backlog.wake()
    assert not has_ended.wait(0.05)
    backlog.add(WaitingLine("b"))
    backlog.close()
    assert has_ended.wait(LIMIT_S)
    assert [text for entries in taken for text in entries] == ["a", "b"]
