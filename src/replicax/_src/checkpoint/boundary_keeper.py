"""``BoundaryKeeper``: keeps the state of the last boundary, and saves it if another process fails.

The main thread marks boundaries. After a failure it may be stuck in a collective, or end with an error, so another
thread saves. Which process saves is decided in ``control/boundary_saves.py``.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import jax

from replicax._src.checkpoint.array_leaves import Held
from replicax._src.checkpoint.background import call_at_exit
from replicax._src.checkpoint.boundary import Boundary, StateReader, TakenState, check_not_divided
from replicax._src.checkpoint.errors import NoBoundaryError
from replicax._src.checkpoint.same_objects import SavedKinds
from replicax._src.cluster.environ import FAILURE_SAVE_LIMIT, limit_s
from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.lowering.spmd import StatePrograms
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")
Message = Mapping[str, Any]
_POLL_S: Final = 0.2
_PURPOSE: Final = "to mark a boundary (save_on_failure)"
# The failure follows the order to freeze at once.
_FAILURE_S: Final = 5.0
MOST_PROGRAMS_WITHOUT: Final = 100
"""The number of launched training programs after which a boundary must have been marked."""


@final
class BoundaryKeeper:
    """Keeps the boundaries of one manager. A process has one active keeper, because its state is consistent only once.

    Without other processes it does nothing: the state ends with this process. It does nothing either where the live
    processes continue after a failure: each has the state.

    Args:
      checkpoint: The tracked objects.
      directory: The directory of the checkpoints, for messages.
      write: Writes a boundary as a complete checkpoint, in another thread.
    """

    def __init__(self, checkpoint: Any, directory: str, write: Callable[[Boundary], None]):
        self._checkpoint, self._directory, self._write = checkpoint, directory, write
        self._reader = StateReader(checkpoint)
        self._boundary: Boundary | None = None
        self._lock = threading.Lock()
        self._is_frozen = False
        self._num_marked = self._num_programs = 0
        self._differing: set[str] = set()
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._end: Callable[[], None] | None = None
        self._is_closed = self._has_noted_close = False
        self._is_over = threading.Event()
        self._deadline = 0.0

    def open(self) -> None:
        """Begins to keep boundaries, if this process trains with others. Opens it again after ``close``.

        Raises:
          InvalidArgumentError: Another keeper is active.
          UnsupportedError: The processes hold different parts of the state.
        """
        self._is_closed = self._has_noted_close = False
        peers = _others()
        if peers is None and joined_peers() is not None:
            log.info(
                "save_on_failure has no effect with fault_tolerance: the live workers keep the state, and continue."
            )
        if peers is None or self._end is not None:
            return
        other = StatePrograms.keeper()
        if isinstance(other, BoundaryKeeper):
            raise InvalidArgumentError(
                f"save_on_failure=True: the manager of {other._directory!r} has it already, and is not closed; this one is of "
                f"{self._directory!r}. The state of a process is consistent at the boundaries of one manager: save all objects "
                "in one rx.Checkpoint, or close the other manager first."
            )
        check_not_divided(self._checkpoint)
        reference: weakref.ref[BoundaryKeeper] = weakref.ref(self)
        stop = peers.listen_for_saving(lambda message: _passed_on(reference, message))
        self._end = weakref.finalize(self, _close, peers, stop)
        _finish_at_exit()
        _open.add(self)
        StatePrograms.keep(self)
        peers.send_about_saving({"kind": "keeps"})

    def close(self) -> None:
        """Lets the state go. May be called twice. Later marks do nothing, so that programs donate the state again."""
        if self._is_frozen:
            return
        self._is_closed = True
        if self._end is None:
            return
        self._end()
        self._end = self._boundary = None
        StatePrograms.let_go(self)
        _open.discard(self)
        self._reader.forget()

    @property
    def is_saving(self) -> bool:
        """True from a failure on until the boundary is saved, here or by another process."""
        return self._is_frozen and not self._is_over.is_set() and time.monotonic() < self._deadline

    def note_training_step(self) -> None:
        """Counts a launch of a training program before the first boundary. An iteration may have several.

        Raises:
          NoBoundaryError: Many were launched, and no boundary was marked.
        """
        if self._num_marked:
            return
        self._num_programs += 1
        if self._num_programs > MOST_PROGRAMS_WITHOUT:
            raise NoBoundaryError(
                f"The CheckpointManager of {self._directory!r} has save_on_failure=True, but this process has launched "
                f"{MOST_PROGRAMS_WITHOUT} training programs (a strategy.run, rx.function, run_steps or step of fit is one; an "
                "iteration may have several) and marked no boundary: nobody knows between which of them the state is "
                "consistent. Call manager.save() after each iteration (with checkpoint_interval and step_counter it returns at "
                "once until the interval is over), run the steps with PreemptionCheckpointHandler.run, or pass a CheckpointCallback "
                "with save_on_failure=True to fit. Otherwise leave save_on_failure out."
            )

    def mark(self, path: str, number: int, *, is_saved: bool, replaced: str | None = None) -> None:
        """Keeps the state as it is now, in place of that of the last boundary. All processes call it at the same step.
        After ``close`` it does nothing, with one warning.

        It waits until all arrays are computed. It communicates only if the processes have different Python states, and
        at the 1st, 2nd, 4th, 8th boundary and so on, to find that out and to check that all keep the same objects.

        Args:
          path: The path of the checkpoint that would have this state.
          number: The number of that checkpoint.
          is_saved: True if a regular save of this state begins now.
          replaced: The identity of the checkpoint that is at the path already; None if there is none.

        Raises:
          ClusterFailureError: Another process failed, and this one has said which boundary it has, which stays. (A task
            that ended after its last step is no failure here.)
          InvalidArgumentError: The processes keep different objects; raised in all.
          UnsupportedError: The processes hold different parts of an array.
          DonatedError: A program has taken the memory of an array of the last boundary.
        """
        peers = _others()
        if peers is None:
            return
        if self._is_closed:
            self._note_closed()
            return
        self.open()
        if self._boundary is not None:
            self._boundary.check_not_donated()
        if is_saved:
            self._reader.forget()  # so that no change of the objects is missed for long
        graph, labels, held, states = self._reader.read()
        jax.block_until_ready([now.value for now in held.values() if isinstance(now.value, jax.Array)])
        version = self._num_marked + 1
        if not version & (version - 1):
            self._compare(peers, path, held, states)
        states_of_all = self._states_of_all(peers, states)
        boundary = Boundary(
            graph, labels, held, states, states_of_all, version, path, number, is_saved, replaced
        )
        with self._lock:
            if not self._is_frozen:
                self._boundary, self._num_marked = boundary, version
                return
        peers.wait_for_failure(_FAILURE_S)
        peers.check_reached()

    def _note_closed(self) -> None:
        if not self._has_noted_close:
            self._has_noted_close = True
            log.warning(
                "The CheckpointManager of %s is closed. It saves, but save_on_failure has ended: if a task dies, the steps "
                "since the newest checkpoint are lost. Close it after the last step, or make another one.",
                self._directory,
            )

    def _compare(
        self, peers: Peers, path: str, held: Mapping[str, Held], states: Mapping[str, TakenState]
    ) -> None:
        """Checks that all processes keep the same objects, and notes the Python states that differ."""
        kinds = SavedKinds({key: (now.value.shape, now.value.dtype) for key, now in held.items()}, states)
        own = {"objects": kinds.digest, "states": {key: state.digest for key, state in states.items()}}
        of_all = peers.gather("boundary digests", own, _PURPOSE)
        kinds.check(
            path,
            [each["objects"] for each in of_all],
            lambda value: peers.gather("boundary objects", value, _PURPOSE),
        )
        digests = [each["states"] for each in of_all]
        self._differing |= {key for key in states if len({each[key] for each in digests}) > 1}

    def _states_of_all(self, peers: Peers, states: Mapping[str, TakenState]) -> dict[str, Sequence[Any]]:
        """Returns the Python states of all processes, where they differ."""
        if not self._differing:
            return {}
        own = {key: states[key].as_json() for key in sorted(self._differing) if key in states}
        of_all = peers.gather("boundary states", own, _PURPOSE)
        return {key: [each.get(key) for each in of_all] for key in own}

    # --- after a failure ------------------------------------------------------------------------------------

    def receive(self, message: Message) -> Message | None:
        """Takes a message of the controller, in the thread of the channel. Returns the answer, if there is one."""
        match message["kind"]:
            case "freeze":
                return self._freeze()
            case "save_boundary" | "boundaries_over":
                self._orders.put(message)
        return None

    def _freeze(self) -> Message:
        self._deadline = time.monotonic() + limit_s(os.environ, FAILURE_SAVE_LIMIT)
        with self._lock:
            self._is_frozen = True
            boundary = self._boundary
        peers = joined_peers()
        assert peers is not None
        peers.hold_end(lambda: self.is_saving)
        try:
            threading.Thread(target=self._serve, name="replicax-boundary", daemon=True).start()
        except RuntimeError:  # Python ends, and starts no threads
            self._is_over.set()
            return {"kind": "frozen", "version": None}
        return {"kind": "frozen", "version": None if boundary is None else boundary.version}

    def _serve(self) -> None:
        peers = joined_peers()
        assert peers is not None
        try:
            while time.monotonic() < self._deadline and not peers.is_cut_off:
                try:
                    order = self._orders.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                if order["kind"] == "boundaries_over":
                    self._tell_end(peers, order["version"], order["saver"])
                    return
                peers.send_about_saving({"kind": "boundary_saved", "is_saved": self._save()})
        finally:
            self._is_over.set()

    def _save(self) -> bool:
        """Saves the boundary. Returns True if it is on the disk."""
        boundary = self._boundary
        assert boundary is not None
        began = time.monotonic()
        try:
            self._write(boundary)
        except BaseException as error:
            log.warning(
                "The state of the last boundary could not be saved. %s: %s", type(error).__name__, error
            )
            return False
        log.warning(
            "Saved the state of the last boundary as %s (%.2f s), because another task failed. A restart resumes there.",
            boundary.path,
            time.monotonic() - began,
        )
        return True

    def _tell_end(self, peers: Peers, version: int | None, saver: int | None) -> None:
        if saver is None and self._boundary is not None:
            log.warning(
                "No task saved the state of a last boundary. A restart resumes at the newest checkpoint of %s, or starts "
                "from the beginning if there is none.",
                self._directory,
            )
        elif saver not in (None, peers.number):
            log.info("%s saved the state of boundary %s.", peers.names[saver], version)

    def wait_until_saved(self) -> None:
        """Waits until the last boundary is saved, if a process has failed."""
        if self._is_frozen:
            self._is_over.wait(max(0.0, self._deadline - time.monotonic()))


def _others() -> Peers | None:
    """Returns the other processes, if their death ends the run. Otherwise the survivors keep the state themselves."""
    peers = joined_peers()
    return None if peers is None or peers.tolerates_failures else peers


def _passed_on(reference: weakref.ref[BoundaryKeeper], message: Message) -> Message | None:
    keeper = reference()
    return None if keeper is None else keeper.receive(message)


def _close(peers: Peers, stop_listening: Callable[[], None]) -> None:
    stop_listening()
    peers.send_about_saving({"kind": "keeps_none"})


_open: weakref.WeakSet[BoundaryKeeper] = weakref.WeakSet()


@functools.cache
def _finish_at_exit() -> None:
    """Makes Python wait at exit for the save of a boundary."""
    call_at_exit(_wait_for_all)


def _wait_for_all() -> None:
    for keeper in list(_open):
        keeper.wait_until_saved()
