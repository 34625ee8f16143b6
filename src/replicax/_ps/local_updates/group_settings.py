"""What all groups must agree on, as lines of text. Pure. The first group stores them on each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self, final

from replicax._src.program_kit.errors import InvalidArgumentError

_REMARK: Final = "\t"


@final
class GroupSettings:
    """The settings of one group.

    Args:
      member: The number of the group.
      settings: Names and values, in the order in which they are compared. After a tab a value may have a remark, which
        is not compared: the name of a variable.
    """

    def __init__(self, member: int, settings: Sequence[tuple[str, str]]):
        self._member, self._settings = member, tuple(settings)

    def encoded(self) -> bytes:
        """Returns the text that a server stores."""
        lines = [str(self._member), *("=".join(each) for each in self._settings)]
        return "\n".join(each.replace("\n", " ") for each in lines).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        """Reads what another group has stored."""
        member, *lines = text.decode(errors="replace").split("\n")
        pairs = [line.partition("=") for line in lines]
        return cls(int(member), [(name, value) for name, _, value in pairs])

    def check_like(self, stored: GroupSettings) -> None:
        """Checks that the group which has stored its settings has the same.

        Raises:
          InvalidArgumentError: They differ. It names both groups and the first difference.
        """
        own, other = dict(self._settings), dict(stored._settings)
        for name in [*own, *(name for name in other if name not in own)]:
            here, there = own.get(name, "none"), other.get(name, "none")
            if here.partition(_REMARK)[0] != there.partition(_REMARK)[0]:
                raise InvalidArgumentError(
                    f"Groups differ: {name} is {_shown(here)} in group {self._member}, and {_shown(there)} in group "
                    f"{stored._member}. All groups must run the same program with the same LocalUpdates. If the servers have "
                    "the values of an earlier job, end them and delete their snapshots."
                )


def _shown(value: str) -> str:
    compared, _, remark = value.partition(_REMARK)
    return f"{compared} ({remark})" if remark else compared
