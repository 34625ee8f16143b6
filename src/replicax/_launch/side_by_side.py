"""Runs the jobs of groups and syncers beside each other, each as a supervisor in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final

from replicax._launch.group_endings import FinishSyncers, GroupEndings, Say
from replicax._launch.passed_on_signals import signals_noticed
from replicax._launch.supervisor import Supervisor
from replicax._src.cluster.processes import ProcessStartError

_TICK_S: Final = 0.5  # a signal interrupts the wait


def run_side_by_side(
    groups: Mapping[str, Supervisor], syncers: Mapping[str, Supervisor], say: Callable[[str], None]
) -> int:
    """Runs jobs from the main thread until all have ended. Returns the exit code for the launcher.

    Args:
      groups: The groups, by their names.
      syncers: The syncers, by their names, which differ from those.
      say: Shows a message.
    """
    jobs = {**groups, **syncers}
    endings = GroupEndings(list(groups))
    ended: queue.SimpleQueue[tuple[str, int | BaseException]] = queue.SimpleQueue()

    def notice(number: int, frame: FrameType | None = None) -> None:
        endings.signal(number)
        for supervisor in jobs.values():
            supervisor.notice(number)

    def run(name: str) -> None:
        try:
            ended.put((name, jobs[name].run_beside()))
        except BaseException as error:
            ended.put((name, error))

    def take(name: str, outcome: int | BaseException) -> None:
        if isinstance(outcome, ProcessStartError):
            say(f"{name}: {outcome}")
            outcome = 1
        if isinstance(outcome, BaseException):  # a fault of the launcher
            notice(signal.SIGTERM)
            faults.append(outcome)
            outcome = 1
        event = endings.group_ended if name in groups else endings.syncer_ended
        for action in event(name, outcome):
            match action:
                case Say(text):
                    say(text)
                case FinishSyncers():
                    for supervisor in syncers.values():
                        supervisor.finish()

    faults: list[BaseException] = []
    num_left = len(jobs)
    with signals_noticed(notice):
        for name in jobs:
            threading.Thread(target=run, args=(name,), name=f"replicax {name}", daemon=True).start()
        while num_left:
            with contextlib.suppress(queue.Empty):
                take(*ended.get(timeout=_TICK_S))
                num_left -= 1
    if faults:
        raise faults[0]
    return endings.exit_code
