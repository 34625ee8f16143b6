"""The place of a job among groups that train alone and exchange what they learned. Pure.

``replicax launch --groups`` sets the two variables, or the user does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self, final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.spec import split_address

GROUP_VARIABLE: Final = "REPLICAX_GROUP"
SYNCERS_VARIABLE: Final = "REPLICAX_SYNCERS"


@final
@dataclass(frozen=True)
class GroupPlace:
    """A group and its syncers.

    Attributes:
      index: The number of the group, from 0.
      num_groups: The number of groups.
      syncers: The addresses of the parameter servers through which groups exchange, in the same order in all groups.

    >>> GroupPlace.of_environment({"REPLICAX_GROUP": "1/4", "REPLICAX_SYNCERS": "localhost:2222"})
    GroupPlace(index=1, num_groups=4, syncers=('localhost:2222',))
    """

    index: int
    num_groups: int
    syncers: tuple[str, ...]

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """Reads ``REPLICAX_GROUP`` and ``REPLICAX_SYNCERS``. Returns None if the first is not set.

        Raises:
          ClusterEnvironmentError: They are not of their form, or only one is set.
        """
        group, syncers = environ.get(GROUP_VARIABLE, ""), environ.get(SYNCERS_VARIABLE, "")
        if not group:
            if syncers:
                raise ClusterEnvironmentError(
                    f"{SYNCERS_VARIABLE}={syncers!r} is set, and {GROUP_VARIABLE} is not. Set it to the number of this group "
                    f"and the number of groups, {GROUP_VARIABLE}=0/4, or unset both to train as one group."
                )
            return None
        number, _, total = group.partition("/")
        is_form = all(each.isascii() and each.isdecimal() for each in (number, total))
        if not is_form or int(number) >= int(total):
            raise ClusterEnvironmentError(
                f"{GROUP_VARIABLE}={group!r} in the environment must be the number of this group, from 0, and the number of "
                f"groups: {GROUP_VARIABLE}=0/4 to 3/4 for 4 groups. Correct it."
            )
        addresses = tuple(each.strip() for each in syncers.split(",") if each.strip())
        if not addresses:
            raise ClusterEnvironmentError(
                f"{GROUP_VARIABLE}={group!r} is set, and {SYNCERS_VARIABLE} is not. Set it to the addresses of the parameter "
                f"servers through which groups exchange: {SYNCERS_VARIABLE}=host:port,host:port."
            )
        for address in addresses:
            split_address(address, source=SYNCERS_VARIABLE)
            if addresses.count(address) > 1:
                raise ClusterEnvironmentError(
                    f"{SYNCERS_VARIABLE}={syncers!r} has {address} {addresses.count(address)} times. Name each parameter server "
                    "once, in the same order in all groups."
                )
        return cls(int(number), int(total), addresses)
