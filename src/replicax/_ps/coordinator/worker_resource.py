"""``Resource``: a dataset or value that every worker makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np


@final
@dataclass(frozen=True, eq=False)
class Resource:
    """A dataset or value that every worker makes.

    Attributes:
      name: A name that is never used again.
      kind: "dataset", which is iterated, or "value".
      pickle: The pickled function that makes it, as uint8.
      function: The name of that function, for messages.
    """

    name: str
    kind: Literal["dataset", "value"]
    pickle: np.ndarray
    function: str = ""

    def fields(self, num_replicas: int) -> dict[str, Any]:
        """Returns the fields of the message with which a worker of that many replicas makes it."""
        return {"op": "resource", "name": self.name, "kind": self.kind, "num_replicas": num_replicas}
