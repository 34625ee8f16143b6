"""Restores a checkpoint on disk into the objects of a program, matched by the names of attributes, from the root
down.

Objects that do not exist yet get their values when they are made: the matches are remembered, and matching continues
whenever one of the objects gets new parts.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_leaves import ArrayLeaf
from replicax._src.checkpoint.contents import SavedArray, SavedObject
from replicax._src.checkpoint.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    enumerated,
    listed,
)
from replicax._src.checkpoint.graph import Graph, contents_of, kind_of
from replicax._src.checkpoint.in_memory import ReadableCheckpoint
from replicax._src.checkpoint.newest import Newest
from replicax._src.checkpoint.tracked import Growing, Leaf
from replicax._src.checkpoint.trees import HeldTree, StateLeaf, TreeNumber
from replicax._src.jax_internals import jax_compat
from replicax._src.values.framework import trackings

log = logging.getLogger("replicax")

Together = Callable[[Callable[[], Any]], Any]
"""Runs a function in each process, and returns its result; raises in all if it fails in one."""

_NUM_THREADS = 4  # read small arrays at the same time; the chunks of a large one are
_MOST_BYTES_OF_SMALL = 8 << 20
_numbers = itertools.count()
_newest = Newest()


@final
@dataclass(frozen=True)
class _Pair:
    """A leaf, and its saved value."""

    number: int
    key: str
    leaf: Leaf


def advance_all(restorations: Iterable[Restoration]) -> None:
    """Makes each restoration match what it can, oldest first. Raises the first error after all have run."""
    errors: list[Exception] = []
    for each in sorted(restorations, key=lambda each: each.number):
        try:
            each.advance()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _is_growing(tracked: Any) -> bool:
    """True if an object will get more parts. It is unknown if attributes of a checkpoint will be set later."""
    return any(tracking.is_growing(tracked) for tracking in trackings())


def _num_bytes(leaf: ArrayLeaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


@final
class Restoration:
    """The restore of one checkpoint into the objects under a root, now and later.

    Args:
      saved: The checkpoint.
      root: The root object, of the structure that was saved.
      state_of: Chooses this process's state among those of several processes.
      share: The number of this process, and of all that restore together.

    Attributes:
      number: A later restore has a larger number. If several restore the same object, the latest wins, even if an
        earlier
        one was waiting for the object.
      is_asked: True if the user has asked which values were not restored.
    """

    def __init__(
        self,
        saved: ReadableCheckpoint,
        root: Any,
        state_of: Callable[[str, Sequence[Any], Callable[[Sequence[Any]], Any]], Any],
        share: tuple[int, int] = (0, 1),
    ):
        self.saved, self.number = saved, next(_numbers)
        self._share = share
        self.is_asked = False
        self._is_dropped = False
        self._root, self._state_of = root, state_of
        self._objects: dict[int, Any] = {}
        self._restored: set[int] = set()
        self._refused: dict[int, tuple[Leaf, str]] = {}
        self._of_other_kind: dict[int, str] = {}
        self._grown: set[int] = set()
        self._met: set[Hashable] = set()
        self._watched: set[int] = set()
        self._is_advancing = False

    @property
    def num_restored(self) -> int:
        """The number of restored values."""
        return len(self._restored)

    @property
    def is_whole(self) -> bool:
        """True if every value of the checkpoint has been restored."""
        return not self.unrestored()

    @property
    def has_ended(self) -> bool:
        """True if no more values will be restored."""
        return self._is_dropped or self.is_whole

    def drop(self) -> None:
        """Ends the restoration, because another checkpoint is restored in its place."""
        self._is_dropped = True

    def advance(self, *, is_strict: bool = False, together: Together | None = None) -> None:
        """Matches what can be matched by now, and restores it.

        Args:
          is_strict: True to raise if the checkpoint lacks values of the program and also has others: it then belongs
            to another model. Only one of the two is allowed.
          together: Runs the reading, and raises in all processes if it fails in one. It is given in the first call,
            which then also verifies what no object takes.

        Raises:
          CheckpointMismatchError: Shapes or dtypes differ, or names if it is strict, or no name is in common; nothing
            was restored. It is raised once: values that differ are ignored from then on.
          CorruptCheckpointError: Values are damaged; nothing was restored, and nothing will be.
        """
        if self._is_advancing or self._is_dropped:
            return
        self._is_advancing = True
        try:
            read = functools.partial(self._read, is_strict=is_strict, is_first=together is not None)
            pairs, fetched, missing = read() if together is None else together(read)
            self._give(pairs, fetched)
            if self._make_room():
                grown = self._awaited()
                self._give(grown, self._fetched(grown))
                pairs += grown
            if pairs:
                self._finish()
            self._tell_of(missing)
            self._watch()
        except CorruptCheckpointError:
            self.drop()
            raise
        finally:
            self._is_advancing = False

    def matches(self) -> dict[str, Leaf]:
        """Returns the leaves that have a counterpart, by its key. It reads and restores nothing.

        Raises:
          CheckpointMismatchError: Shapes or dtypes differ.
        """
        pairs = self._matched()
        self._check(pairs, [], [])
        return {pair.key: pair.leaf for pair in pairs}

    def _read(self, *, is_strict: bool, is_first: bool) -> tuple[list[_Pair], dict[str, Any], list[str]]:
        """Checks what was matched, and reads it into memory. It changes nothing."""
        pairs = self._awaited()
        missing = self.unsaved() if is_strict or is_first else []
        self._check(pairs, missing, self._homeless() if is_strict and missing else [])
        if is_first and not pairs:
            self._check_may_match()
        fetched = self._fetched(pairs)
        if is_first:
            self.saved.verify({pair.key for pair in pairs}, share=self._share)
        return pairs, fetched, missing

    def _fetched(self, pairs: Sequence[_Pair]) -> dict[str, Any]:
        """Returns what this process needs of the values, on the host."""
        arrays = [(pair.key, pair.leaf) for pair in pairs if isinstance(pair.leaf, ArrayLeaf)]
        small = [(key, leaf) for key, leaf in arrays if _num_bytes(leaf) <= _MOST_BYTES_OF_SMALL]
        options = jax_compat.thread_options()

        def fetch(each: tuple[str, ArrayLeaf]) -> Any:
            key, leaf = each
            with jax_compat.with_thread_options(options):
                return leaf.fetch(self.saved.array(key))

        threads = ThreadPoolExecutor(_NUM_THREADS, "replicax-restore")
        try:
            fetched = dict(zip((key for key, _ in small), threads.map(fetch, small), strict=True))
        finally:
            threads.shutdown(cancel_futures=True)
        for key, leaf in arrays:
            if key not in fetched:
                fetched[key] = leaf.fetch(self.saved.array(key))
        for pair in pairs:
            if not isinstance(pair.leaf, ArrayLeaf) and pair.key in self.saved.contents.arrays:
                fetched[pair.key] = self.saved.array(pair.key).read().item()
        return fetched

    def _awaited(self) -> list[_Pair]:
        """Returns matched values that neither this nor a later restoration has restored, and that were not refused
        before.
        """
        pairs = [pair for pair in self._matched() if pair.number not in self._restored]
        self._restored |= {pair.number for pair in pairs if _newest.is_after(pair.leaf, self.number)}
        return [pair for pair in pairs if pair.number not in self._restored and not self._is_refused(pair)]

    def _is_refused(self, pair: _Pair) -> bool:
        leaf, text = self._refused.get(pair.number, (None, ""))
        return leaf is not None and leaf.identity == pair.leaf.identity and self._difference(pair) == text

    def _matched(self) -> list[_Pair]:
        """Returns all leaves that have a counterpart. A leaf that several paths reach is matched by the first."""
        pairs: list[_Pair] = []
        self._objects = {}
        met: set[Hashable] = set()
        waiting: deque[tuple[int, Any, str]] = deque([(0, self._root, "")])
        while waiting:
            number, tracked, name = waiting.popleft()
            found = contents_of(tracked)
            identity = found.identity if isinstance(found, Leaf) else id(tracked)
            if number in self._objects or identity in met:
                continue
            self._objects[number] = tracked
            met.add(identity)
            node = self._nodes[number]
            if isinstance(found, Leaf):
                pairs.append(_Pair(number, node.key, found))
                continue
            kind = kind_of(tracked) if node.kind else ""
            if kind != node.kind and kind:
                self._note_kind(number, f"{name}: {node.kind} in the checkpoint, {kind} here")
                if _is_growing(tracked):  # such as the unbuilt optimizer of a model that only evaluates
                    met |= {leaf.identity for _, leaf in Graph(tracked).leaves()}
                continue
            parts = found or {}
            waiting.extend(
                (child, parts[part], f"{name}/{part}".lstrip("/"))
                for part, child in node.children.items()
                if part in parts
            )
        self._met = met
        return pairs

    def _note_kind(self, number: int, text: str) -> None:
        """Records an object whose parts have the same names but another meaning, such as momentums. None of it is
        restored.
        """
        if number not in self._of_other_kind:
            self._of_other_kind[number] = text
            log.warning(
                "The checkpoint %r has an object of another kind than the program, and nothing of it is restored: %s.",
                self.saved.path,
                text,
            )

    @property
    def _nodes(self) -> Sequence[SavedObject]:
        return self.saved.contents.objects

    # --- checking and setting ---------------------------------------------------------------------------

    def _homeless(self) -> list[str]:
        """Returns the keys of arrays that have no variable, and will have none, because no object above them will be
        built.
        """
        awaited = deque(n for n, tracked in self._objects.items() if _is_growing(tracked))
        has_home = {*self._objects}
        while awaited:
            new = set(self._nodes[awaited.popleft()].children.values()) - has_home
            has_home |= new
            awaited.extend(new)
        arrays = self.saved.contents.arrays
        return [node.key for n, node in enumerate(self._nodes) if node.key in arrays and n not in has_home]

    def _tell_of(self, missing: Sequence[str]) -> None:
        if missing:
            log.warning(
                "The checkpoint %r does not have %s, so these keep their values.",
                self.saved.path,
                enumerated(missing),
            )

    def _check(self, pairs: Sequence[_Pair], missing: Sequence[str], homeless: Sequence[str]) -> None:
        refused = {pair.number: (pair.leaf, text) for pair in pairs if (text := self._difference(pair))}
        self._refused |= refused
        differ = [text for _, text in refused.values()]
        advice = ""
        if homeless:
            differ += self._of_other_kind.values()
            differ += [f"{key}: not in the checkpoint" for key in missing]
            differ += [f"{key}: only in the checkpoint" for key in homeless]
            advice = ", or restore the values with the same names with manager.restore()" if pairs else ""
        if differ:
            raise CheckpointMismatchError(
                f"The checkpoint {self.saved.path!r} belongs to another model, and nothing of it was "
                f"restored. These differ:\n{listed(differ)}\nMake the model as it was when it was saved, track "
                f"only the parts that are the same{advice}."
            )

    def _check_may_match(self) -> None:
        """Refuses a checkpoint of which nothing was matched, unless objects that both sides have may get more parts.

        A program may also restore before it tracks anything, as in TensorFlow.
        """
        saved = [node.key for node in self._nodes if node.key]
        may_grow = any(
            isinstance(tracked, (Growing, HeldTree)) or _is_growing(tracked)
            for number, tracked in self._objects.items()
            if number and number not in self._of_other_kind
        )
        here = [node.key for node in Graph(self._root).nodes[1:]]
        if may_grow or not (saved and here):
            return
        kinds = "".join(f" {text}." for text in self._of_other_kind.values())
        raise CheckpointMismatchError(
            f"Nothing of the checkpoint {self.saved.path!r} was restored, because the program has none of its "
            f"names.{kinds} The checkpoint has {enumerated(saved)}; the program has {enumerated(self.unsaved() or here)}. "
            "Give the objects the names with which they were saved, such as "
            f"rx.Checkpoint({saved[0].partition('/')[0]}=...), or restore another checkpoint."
        )

    def _difference(self, pair: _Pair) -> str:
        if not pair.key:
            return (
                f"{pair.leaf.label}: one value here, but several, or an object with parts, in the checkpoint"
            )
        array = self.saved.contents.arrays.get(pair.key)
        if isinstance(pair.leaf, StateLeaf):
            return self._difference_of_state(pair, pair.leaf, array)
        assert isinstance(pair.leaf, ArrayLeaf)
        if array is None:
            was = self.saved.contents.states[pair.key][0]
            return f"{pair.key}: a state was saved ({was!s:.60}), but {pair.leaf.label!r} is an array here"
        saved, here = (array.shape, jnp.dtype(array.dtype)), (tuple(pair.leaf.shape), pair.leaf.dtype)
        if saved == here:
            return ""
        names = (
            f"saved as {array.label!r}"
            if array.label == pair.leaf.label
            else f"saved as {array.label!r}, here {pair.leaf.label!r}"
        )
        what = [
            f"{word} {was} in the checkpoint, {now} here"
            for word, was, now in zip(("shape", "dtype"), saved, here, strict=True)
            if was != now
        ]
        return f"{pair.key} ({names}): {'; '.join(what)}"

    def _difference_of_state(self, pair: _Pair, leaf: StateLeaf, array: SavedArray | None) -> str:
        if array is None:
            text = leaf.difference(
                self._state_of(leaf.label, self.saved.contents.states[pair.key], leaf.merged)
            )
            return f"{pair.key}: {text}" if text else ""
        is_complex = jnp.issubdtype(jnp.dtype(array.dtype), jnp.complexfloating)
        if isinstance(leaf, TreeNumber) and not leaf.is_text and not array.shape and not is_complex:
            return ""  # for example a loss, which was an array of one number when it was saved
        what = f"an array of {array.dtype} and shape {array.shape} was saved"
        return f"{pair.key}: {what}, but {leaf.label!r} is a {type(leaf.get()).__name__} here"

    def _give(self, pairs: Sequence[_Pair], fetched: dict[str, Any]) -> None:
        for pair in sorted(pairs, key=lambda pair: isinstance(pair.leaf, ArrayLeaf)):
            leaf = pair.leaf
            if isinstance(leaf, ArrayLeaf):
                leaf.give(fetched.pop(pair.key))
                self.saved.note_given(pair.key, leaf)
                continue
            assert isinstance(leaf, StateLeaf)
            if pair.key in fetched:
                leaf.set(fetched[pair.key])
            else:
                leaf.give(self._state_of(leaf.label, self.saved.contents.states[pair.key], leaf.merged))
        for pair in pairs:
            if isinstance(pair.leaf.of, HeldTree):
                pair.leaf.of.finish()
            _newest.note(pair.leaf, self.number)
        self._restored |= {pair.number for pair in pairs}

    def _make_room(self) -> bool:
        """Returns True if pytrees that had fewer numbers than were saved have been extended.

        Each is extended once, because later changes are the user's.
        """
        has_grown = False
        for number, tracked in self._objects.items():
            if isinstance(tracked, HeldTree) and number not in self._grown:
                self._grown.add(number)
                children = self._nodes[number].children.items()
                if _newest.is_after(tracked, self.number):
                    self._restored |= {child for _, child in children}
                    continue
                _newest.note(tracked, self.number)
                lacking = {
                    name: self._number_at(child)
                    for name, child in children
                    if child not in self._objects and child not in self._restored
                }
                has_grown |= tracked.grow(lacking)
        return has_grown

    def _number_at(self, number: int) -> Any:
        """Returns the saved number or string of an object; for an array with one number, another of its kind; else
        None.
        """
        key, contents = self._nodes[number].key, self.saved.contents
        if key in contents.states:
            state = self._state_of(key, contents.states[key], lambda states: None)
            value = state[0] if isinstance(state, list) else None
            return value if isinstance(value, (bool, int, float, str)) else None
        array = contents.arrays.get(key)
        if array is None or array.shape:
            return None
        dtype = jnp.dtype(array.dtype)
        is_of_jax = jax.dtypes.canonicalize_dtype(dtype) == dtype
        return jnp.zeros((), dtype) if is_of_jax else np.zeros((), dtype)[()]

    def _finish(self) -> None:
        for tracked in self._objects.values():
            for tracking in trackings():
                tracking.finish(tracked)

    def _watch(self) -> None:
        waited_for = self._waited_for()
        for number, tracked in self._objects.items():
            if number in self._watched or number not in waited_for:
                continue
            self._watched.add(number)
            if isinstance(tracked, Growing):
                tracked.awaits(self)
            for tracking in trackings():
                tracking.watch(tracked, self)

    def _waited_for(self) -> set[int]:
        """Returns objects that lack parts, and the objects above them, which may create these.

        Objects above have lower numbers.
        """
        found: set[int] = set()
        for number in sorted(self._objects, reverse=True):
            children = self._nodes[number].children.values()
            if any(child not in self._objects or child in found for child in children):
                found.add(number)
        return found

    # --- values without a counterpart ---------------------------------------------------------------------

    def unrestored(self) -> list[str]:
        """Returns the keys of the checkpoint's values that have not been restored."""
        return [
            node.key for number, node in enumerate(self._nodes) if node.key and number not in self._restored
        ]

    def unsaved(self) -> list[str]:
        """Returns the keys of the program's values that the checkpoint lacks."""
        leaves = Graph(self._root).leaves()
        return [f"{key} ({leaf.label})" for key, leaf in leaves if leaf.identity not in self._met]
