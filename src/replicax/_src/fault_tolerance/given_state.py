"""``GivenState``: all that the chief gives to a replacement, as the content and the arrays of one gift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np

from replicax._src.fault_tolerance.stepped_program import RoundArrays
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError

_CONTENT: Final[Mapping[str, Form[Any]]] = {
    "version": JsonReader.count,
    "rounds": lambda it: it.items(JsonReader.count),
    "figures": lambda it: it.table(JsonReader.anything),
    "peers": lambda it: it.table(JsonReader.anything),
    "versions": lambda it: it.table(JsonReader.string),
    "content": lambda it: it.table(JsonReader.anything),
}


@final
@dataclass(frozen=True)
class GivenState:
    """The state of the training after a step.

    Attributes:
      version: The number of the step.
      sums: The sums of its rounds, because the replacement may be the next that gives them.
      figures: The counts of recoveries so far.
      peers: What the tasks have agreed on; see ``Peers.state_for_newcomers``.
      versions: The versions of the packages that compile programs, by name.
      content: What the program's checkpoint says of the arrays.
      arrays: The arrays of the checkpoint.
    """

    version: int
    sums: Sequence[RoundArrays]
    figures: Mapping[str, Any]
    peers: Mapping[str, Any]
    versions: Mapping[str, str]
    content: Mapping[str, Any]
    arrays: Sequence[np.ndarray]

    def packed(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns the content, which JSON can hold, and the arrays of the gift."""
        content = {
            "version": self.version,
            "rounds": [len(arrays) for arrays in self.sums],
            "figures": dict(self.figures),
            "peers": dict(self.peers),
            "versions": dict(self.versions),
            "content": dict(self.content),
        }
        return content, [*(array for arrays in self.sums for array in arrays), *self.arrays]

    @classmethod
    def unpacked(cls, content: Any, arrays: Sequence[np.ndarray]) -> Self:
        """Reads what ``packed`` returned.

        Raises:
          TextError: It is something else.
        """
        read = JsonReader(content, "the state").record(_CONTENT)
        remaining = iter(arrays)
        rounds = read.pop("rounds")
        if sum(rounds) > len(arrays):
            raise TextError(f"the state has {len(arrays)} arrays, and {sum(rounds)} of them should be sums")
        sums = [[next(remaining) for _ in range(number)] for number in rounds]
        return cls(sums=sums, arrays=list(remaining), **read)
