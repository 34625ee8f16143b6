"""``StoredPosition``: how far a group had trained at a push, in the bytes that the server stores with it. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np

from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.texts import TextError, read_json

NUM_POSITION_BYTES: Final = 1024
_NUM_OF_LENGTH: Final = 2


@final
@dataclass(frozen=True)
class StoredPosition:
    """How far a group had trained.

    Attributes:
      steps, tokens: The steps and rows of all its processes, one after the other.
      data: The position of its data in each process of the group, as ``get_state`` returned it; None without data.
    """

    steps: int = 0
    tokens: int = 0
    data: Sequence[Any] | None = None

    def encoded(self) -> np.ndarray:
        """Returns uint8 [NUM_POSITION_BYTES].

        Raises:
          InvalidArgumentError: The position of the data is no JSON value, or too large.
        """
        try:
            text = zlib.compress(json.dumps([self.steps, self.tokens, self.data]).encode())
        except TypeError as error:
            raise InvalidArgumentError(
                f"rx.experimental.LocalUpdates: get_state of the data returned no JSON value: {error}. Attach data whose "
                "get_state returns numbers, texts, lists and dicts, or leave `data` out."
            ) from None
        most = NUM_POSITION_BYTES - _NUM_OF_LENGTH
        if len(text) > most:
            raise InvalidArgumentError(
                f"rx.experimental.LocalUpdates: the position of the data has {len(text)} bytes, compressed, and the syncers "
                f"store {most} with each push. Leave `data` out, and save the position in a checkpoint."
            )
        stored = np.zeros(NUM_POSITION_BYTES, np.uint8)
        stored[:_NUM_OF_LENGTH] = divmod(len(text), 256)
        stored[_NUM_OF_LENGTH : _NUM_OF_LENGTH + len(text)] = np.frombuffer(text, np.uint8)
        return stored

    @classmethod
    def decoded(cls, stored: np.ndarray) -> Self:
        """Reads what ``encoded`` returned; the beginning if nothing was stored."""
        high, low = map(int, stored[:_NUM_OF_LENGTH])
        text = stored[_NUM_OF_LENGTH : _NUM_OF_LENGTH + 256 * high + low].tobytes()
        if not text:
            return cls()
        try:
            return cls(*read_json(zlib.decompress(text)))
        except (zlib.error, TypeError, TextError) as error:
            raise InvalidArgumentError(
                f"rx.experimental.LocalUpdates: a syncer stores a position that cannot be read: {error}. If it has the values "
                "of another version of replicax, end it and delete its snapshots."
            ) from error
