"""``Member``: a process of an epoch, and the replicas that it computes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from replicax._src.vocabulary.errors import InvalidArgumentError


@final
@dataclass(frozen=True)
class Member:
    """A process of an epoch.

    Attributes:
      number: Its number, which no other process of the job has or had.
      name: Its name for messages: ``"worker 2"``.
      address: ``host:port``, where it meets the others.
      replicas: The numbers of the replicas that it computes, in order.
    """

    number: int
    name: str
    address: str
    replicas: tuple[int, ...]


def check_members(members: Sequence[Member]) -> None:
    """Checks that each replica has one member, and no number occurs twice.

    Raises:
      InvalidArgumentError: Otherwise.
    """
    replicas = sorted(replica for member in members for replica in member.replicas)
    if not replicas or replicas != list(range(len(replicas))):
        raise InvalidArgumentError(
            f"The members of a world hold the replicas {replicas}; each number from 0 on must occur once."
        )
    numbers = [member.number for member in members]
    if len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(
            f"The members of a world have the numbers {numbers}; each must occur once."
        )
    for member in members:
        if not member.replicas or list(member.replicas) != sorted(member.replicas):
            raise InvalidArgumentError(
                f"{member.name} holds the replicas {member.replicas}; a member holds at least one, in their order."
            )
