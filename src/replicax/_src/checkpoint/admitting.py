"""Replacements of dead processes: the manager that admits them, and the state that a replacement has got.

A replacement enters where its program restores, and gets the state of the chief, from memory. The chief gives it at a
boundary, which is the end of ``manager.save()``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.carried_values import from_json
from replicax._src.checkpoint.errors import CorruptCheckpointError
from replicax._src.checkpoint.in_memory import CheckpointInMemory
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError

log = logging.getLogger("replicax")


@final
class StateOfChief:
    """The state that a replacement has got from the chief.

    Args:
      description, arrays: What ``CheckpointManager`` has given.

    Attributes:
      giver: The name of the chief.
      directory, name: The directory of its manager, and the beginning of the names of its checkpoints.
      saved: The checkpoint of that manager.
      counts: The values by which that manager decides about later saves.
      carried: The values that travel beside the checkpoint, by name.

    Raises:
      CorruptCheckpointError: The chief has another version of replicax.
    """

    def __init__(self, description: Mapping[str, Any], arrays: Sequence[np.ndarray]):
        try:
            fields = JsonReader(description, "state").record(_FIELDS)
        except TextError as error:
            raise CorruptCheckpointError(
                f"The state that this replacement has got is not one of a CheckpointManager ({error}). Use one version of "
                "replicax in all processes."
            ) from error
        self.giver, self.directory, self.name = fields["giver"], fields["directory"], fields["name"]
        num_pieces = len(fields["checkpoint"]["pieces"])
        self.saved = CheckpointInMemory(fields["path"], fields["checkpoint"], arrays[:num_pieces])
        self.counts: Mapping[str, Any] = fields["counts"]
        self.carried = {
            name: from_json(each, arrays[num_pieces:]) for name, each in fields["carried"].items()
        }
        agreement.take_directories(fields["directories"])


_FIELDS: Final[Mapping[str, Form[Any]]] = {
    "giver": JsonReader.string,
    "directory": JsonReader.string,
    "name": JsonReader.string,
    "path": JsonReader.string,
    "checkpoint": lambda it: it.record({"pieces": JsonReader.anything}, others=True),
    "counts": lambda it: it.table(JsonReader.anything),
    "carried": lambda it: it.table(JsonReader.anything),
    "directories": lambda it: it.items(
        lambda each: each.fixed(JsonReader.string, lambda given: given.table(JsonReader.string))
    ),
}


@final
class AdmittingManagers:
    """The managers of this process that may admit replacements, and the state that it got as a replacement."""

    def __init__(self) -> None:
        self._restored: weakref.WeakSet[Any] = weakref.WeakSet()
        self._saving: weakref.WeakSet[Any] = weakref.WeakSet()
        self._state: StateOfChief | None = None
        self._has_warned = False

    def note_restored(self, manager: Any) -> None:
        """Notes that the program restores with a manager: a replacement would enter there."""
        self._restored.add(manager)

    def drop(self, manager: Any) -> None:
        """Notes that a manager is closed."""
        self._restored.discard(manager)
        self._saving.discard(manager)

    def may_admit(self, manager: Any) -> bool:
        """Notes that a manager saves. Returns True if it is the only one that has restored and saves. Warns once."""
        if manager not in self._restored:
            return False
        self._saving.add(manager)
        if len(self._saving) == 1:
            return True
        if not self._has_warned:
            self._has_warned = True
            directories = ", ".join(sorted(repr(one.directory) for one in self._saving))
            log.warning(
                "Replacements of dead workers cannot enter: %d CheckpointManagers save this program's state (%s), and a "
                "replacement gets that of one. Save all objects in one rx.Checkpoint, or close the other manager.",
                len(self._saving),
                directories,
            )
        return False

    def state_of_chief(self, admission: Any) -> StateOfChief | None:
        """Returns the state that this process gets as a replacement, or got before it took part in a step. It enters,
        and blocks, if it has not done so. None if it is no replacement, or takes part already.
        """
        if admission.is_newcomer:
            self._state = StateOfChief(*admission.enter())
        elif not agreement.is_solo():
            self._state = None
        return self._state

    def forget_state(self) -> None:
        """Frees the memory of the state."""
        self._state = None


_of_admissions: weakref.WeakKeyDictionary[Any, AdmittingManagers] = weakref.WeakKeyDictionary()


def admitting_managers(admission: Any) -> AdmittingManagers:
    """Returns the managers of this process that may admit replacements."""
    return _of_admissions.setdefault(admission, AdmittingManagers())
