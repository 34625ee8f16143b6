"""The reports of the tasks of a ``LocalCluster``, while they run."""

import time


def latest(task, name):
    """The newest value of this name."""
    return next(report[name] for report in reversed(task.reports) if name in report)


def count(task, name):
    """The number of reports."""
    return sum(name in report for report in task.reports)


def wait_for_count(task, name, number, within_s):
    """Waits until there are that many; the task must run meanwhile."""
    deadline = time.monotonic() + within_s
    while True:
        is_running = task.is_running  # first: it may report and end meanwhile
        if count(task, name) >= number:
            return
        assert is_running, "\n".join(task.output[-30:])
        assert time.monotonic() < deadline
        time.sleep(0.02)
