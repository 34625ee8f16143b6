"""``Standing``: the part of a process in a training with fault tolerance, and the dates of what it does.

``control/dates.py`` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final


class Standing(Protocol):
    """What the training thread has agreed on with the others: an ``EpochMember``."""

    @property
    def version(self) -> int | None:
        """The number of steps that this process has committed; None until it has the state."""
        ...

    @property
    def participants(self) -> tuple[int, ...]:
        """The members that take part in what begins now. Any thread may read it."""
        ...

    @property
    def is_solo(self) -> bool:
        """True in a newcomer until it has committed its first step."""
        ...

    @property
    def last_entry(self) -> int | None:
        """The version at which a member entered last that has committed a step since; None if there is none."""
        ...


@final
@dataclass(frozen=True)
class Moment:
    """The moment at which something begins that several all-gathers belong to, such as a save.

    Attributes:
      date: Those that take part since this date complete its all-gathers.
      is_solo: True if this process is solo at that moment. Then its all-gathers are its own.
    """

    date: int = 0
    is_solo: bool = False


@final
@dataclass(frozen=True)
class Topic:
    """The topic of all-gathers that one thread makes, from one moment on; see ``Peers.new_topic``."""

    name: str
    moment: Moment
