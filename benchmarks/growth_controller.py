"""Measures the controller of the control channel, the real machine, with simulated members on virtual time.

Members start, agree on a program, send heartbeats while they read batches and run steps, and end. A number is the
processor time of the controller for one event, which is one message or one member's part in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from replicax._src.control.controller import Controller

_NUM_SECONDS = 3
_LEAST_EVENTS = 2_000

Event = Callable[[], object]


_SIZES = (16, 64, 250, 1_000)


def measure(most_members: int) -> dict[str, dict[int, list[float]]]:
    """Returns the values of each row of the table, by the number of members."""
    values: dict[str, dict[int, list[float]]] = {}
    for num_members in _SIZES:
        if num_members <= most_members:
            for name, some in _measured(num_members).items():
                values.setdefault(name, {})[num_members] = some
    return values


def _measured(num_members: int) -> dict[str, list[float]]:
    num_rounds = max(1, -(-_LEAST_EVENTS // (num_members * _NUM_SECONDS)))
    values: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for name, us in _life(num_members).items():
            values.setdefault(f"{name}, processor time for each", []).append(us)
    return values


def _life(num_members: int) -> dict[str, float]:
    controller = Controller([f"worker {number}" for number in range(num_members)])
    members = range(num_members)
    key, purpose = "program 0", {"program": "#0 step"}
    offer = {"kind": "offer", "key": key, "value": "digest", "position": 0, "purpose": purpose}
    return {
        "start: a member joins": us(lambda n=n: controller.join(n, 0.0) for n in members),
        "an all-gather: a member offers": us(
            lambda n=n: controller.receive(n, {**offer, "status": _status(-1, None, "between")}, 0.1)
            for n in members
        ),
        "steps: a heartbeat": us(_heartbeats(controller, num_members)),
        "steps: a tick": us([lambda: controller.tick(9.0)] * _NUM_SECONDS) / num_members,
        "end: a member leaves and the others are told": us(
            lambda n=n: controller.receive(
                n, {"kind": "left", "status": _status(99, "#0 step", "between")}, 9.0
            )
            for n in members
        ),
    }


def _heartbeats(controller: Controller, num_members: int) -> Iterator[Event]:
    """Yields the heartbeats of some seconds. Every third member waits for a batch, and the others are in a step."""
    for second in range(1, 1 + _NUM_SECONDS):
        for number in range(num_members):
            reads = 10 * second + (number % 3 != 0)
            status = {**_status(10 * second, "#0 step", "in"), "reads": reads}
            if number % 3 == 0:
                status |= {"doing": "between", "reading": [10 * second, reads, "a dataset"]}
            yield lambda n=number, s=status, at=float(second): controller.receive(
                n, {"kind": "heartbeat", "status": s}, at
            )


def _status(position: int, program: str | None, doing: str) -> Mapping[str, Any]:
    return {"position": position, "program": program, "doing": doing}


def us(events: Iterable[Event]) -> float:
    """Returns the processor time of an event."""
    events = list(events)
    before = time.process_time()
    for event in events:
        event()
    return 1e6 * (time.process_time() - before) / len(events)
