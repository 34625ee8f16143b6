"""The rules that say what a store accepts, what it applies once, and which versions its shards have. Pure.

Values are opaque: these rules have the keys, kinds and version numbers of shards, and the numbers of calls. They have
no array, lock or thread. ``window.py`` records which calls have run.

- Only the coordinator that owns the store is answered. Another one starts with an empty store.
- A closure, a round or another call that must run once is recorded by its number when it has changed the store. If it
  comes again, it changes nothing. Below the low-water mark that its client sends, all calls have ended.
- Before the store goes back to a snapshot, the coordinator says which closures have ended. They stay ended: their
  updates are undone, and a push of one of them that comes late is not applied.
- A refused call changes nothing, and is not recorded: it may be sent again.
- Gradients are held until their round is applied. Gradients of a round that has been applied are late, and dropped.
- The version of a shard rises with each change, and a number is never used again for its key, also not after the shard
  was dropped and created again. A version means something only with the *instance* of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._ps.store.window import Windows
from replicax._src.program_kit.errors import SnapshotError, UnavailableError

Version = tuple[str, int]
"""The instance of a store, and the number of a shard's version there."""


@final
@dataclass(frozen=True)
class Closure:
    """The number of a closure, and the session id of its coordinator. Rounds and other calls that are done once
    use it too.
    """

    incarnation: str
    number: int

    @property
    def round_closure(self) -> Closure:
        """The same number, for a round of the same coordinator."""
        return Closure(f"{self.incarnation} rounds", self.number)


@final
class StoreRules:
    """The owner of a store, the calls that have run, and the numbers of versions. Not thread-safe.

    Args:
      instance: An id that no other store has.

    Attributes:
      owner: The session id of the coordinator that owns the store; None if there is none.
      instance: The id of the store, which changes when its versions no longer count.
      windows: The numbers of the calls that have run, by client.
      num_created: The number of shards ever created.
      num_changes: A number that differs after every change of a value.
    """

    def __init__(self, instance: str):
        self.owner: str | None = None
        self.instance = instance
        self.windows = Windows()
        self.num_created = self.num_changes = 0
        # The coordinator, ``stop``, and the closures below that had not ended, from the highest down.
        self._ended: tuple[str, int, list[int]] | None = None
        self._highest_version = 0
        self.session = 0

    # --- the owner ----------------------------------------------------------------------------------------------

    def hello(self, incarnation: str) -> bool:
        """Gives the store to a coordinator. Returns True if all values must be dropped, as they are another's."""
        if incarnation == self.owner:
            return False
        self.owner = incarnation
        self.session += 1
        self.forget()
        return True

    def leave(self, instance: str) -> None:
        """Records that the coordinator has left. All values must be dropped."""
        self.owner, self.instance = None, instance
        self.session += 1
        self.forget()

    def forget(self) -> None:
        """Records that all values are dropped. Version numbers go on."""
        self.windows = Windows()

    def check(self, sender: str | None) -> None:
        """Raises UnavailableError unless the store belongs to the sender."""
        if self.owner is None or sender != self.owner:
            raise UnavailableError(
                f"The parameter server holds variables of coordinator {self.owner}, and got a message of "
                f"coordinator {sender}: the server was restarted, or another coordinator has taken it over."
            )

    # --- once ---------------------------------------------------------------------------------------------------

    def has_done(self, call: Closure | None, low: int) -> bool:
        """True if a call that must run once has run. All calls of that client below ``low`` have ended."""
        if call is None:
            return False
        self.raise_low(call, low)
        return call.number in self.windows.window_of(call.incarnation)

    def raise_low(self, call: Closure | None, low: int) -> None:
        """Records that all calls of a client below ``low`` have ended."""
        if call is None:
            return
        self.windows.window_of(call.incarnation).raise_low(low)
        if self._ended is not None and self._ended[0] == call.incarnation:
            unfinished = self._ended[2]
            while unfinished and unfinished[-1] < low:
                unfinished.pop()

    def did(self, call: Closure | None) -> None:
        """Records that a call that must run once has run."""
        if call is not None:
            self.windows.window_of(call.incarnation).add(call.number)

    def end(self, incarnation: str, stop: int, unfinished: Iterable[int]) -> None:
        """Records that all closures of a coordinator below ``stop`` have ended, besides these, whatever is restored."""
        self._ended = incarnation, stop, sorted(unfinished, reverse=True)
        self._apply_ended()

    def _apply_ended(self) -> None:
        if self._ended is not None and self._ended[0] == self.owner:
            incarnation, stop, unfinished = self._ended
            self.windows.window_of(incarnation).end(stop, frozenset(unfinished))

    def holds(self, closure: Closure, round_number: int) -> bool:
        """True if the gradients of a closure are kept for a round; False if the round has been applied."""
        rounds = closure.round_closure.incarnation
        return round_number not in self.windows.window_of(rounds)

    # --- versions -----------------------------------------------------------------------------------------------

    def created(self) -> int:
        """Records a new shard. Returns the number of its version."""
        self._highest_version += 1
        self.num_created += 1
        self.num_changes += 1
        return self._highest_version

    def changed(self, number: int) -> int:
        """Records that a shard has another value. Returns the number of the new version.

        Args:
          number: The number of the version before.
        """
        self._highest_version = max(self._highest_version, number + 1)
        self.num_changes += 1
        return number + 1

    def is_new(self, number: int, version: Version | None) -> bool:
        """True if a client that has a version must be sent the value of the version with this number."""
        return version != (self.instance, number)

    def staleness(self, used: Iterable[tuple[int, Version | None]]) -> int | None:
        """Returns the largest number of changes since a version was used; None if no version belongs to this store.

        Args:
          used: The number of each shard's version now, and the version that was used.
        """
        instance = self.instance
        ages = [
            number - version[1] for number, version in used if version is not None and version[0] == instance
        ]
        return max(0, *ages) if ages else None

    # --- a snapshot, or another store ---------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Returns the rules' part of a snapshot, as JSON."""
        return {
            "instance": self.instance,
            "incarnation": self.owner,
            "highest_number": self._highest_version,
            "windows": self.windows.described(),
        }

    def check_session(self, session: int | None) -> None:
        """Raises SnapshotError if a coordinator has come or has left since a session: what the store has now stays."""
        if session not in (None, self.session):
            raise SnapshotError(
                "Nothing was restored: while the snapshot was read, a coordinator has taken the parameter server over, "
                f"or has left it. It belongs to coordinator {self.owner} now, which alone may restore snapshots."
            )

    def begin_restore(self, session: int | None = None) -> None:
        """Records that all values are dropped, because those of a snapshot follow. The store is nobody's until then.

        Raises:
          SnapshotError: The session is over.
        """
        self.check_session(session)
        self.owner = None
        self.forget()

    def take(self, described: Mapping[str, Any], instance: str) -> None:
        """Continues from what was ``described``, as another instance, because version numbers restart and may stand
        for other values.
        """
        self.instance = instance
        self.owner, self._highest_version = described["incarnation"], described["highest_number"]
        self.windows = Windows.of(described["windows"])
        self._apply_ended()


def absent(
    new: Sequence[tuple[str, Hashable]],
    held: Mapping[str, Hashable],
    refuse: Callable[[str, Hashable], Exception],
    *,
    if_absent: bool,
) -> list[bool]:
    """Returns for each shard that is to be created whether it must be: all or none are created.

    Args:
      new: The keys and the kinds (shape and dtype) of the shards.
      held: The kinds of the shards that exist.
      refuse: Returns the error for a shard that exists, given its key and kind.
      if_absent: True if a shard of the same kind may exist, and keeps its value.
    """
    for key, kind in new:
        if key in held and not (if_absent and held[key] == kind):
            raise refuse(key, kind)
    return [key not in held for key, _ in new]
