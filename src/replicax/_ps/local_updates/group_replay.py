"""``rx.testing.replay_groups``: repeats a run of ``LocalUpdates`` in one process, from the logs of its groups."""

from __future__ import annotations

import contextvars
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np

from replicax._ps.local_updates.background_exchange import AskServer, ExchangedFragment
from replicax._ps.local_updates.group_exchange import PlaceOuter
from replicax._ps.local_updates.logged_events import LoggedProcess, ServedVersion
from replicax._ps.local_updates.outer_optimizer import OuterSgd, outer_optimizer_of
from replicax._ps.local_updates.replay_file import read_replay_file
from replicax._ps.local_updates.replay_plan import ReplayPlan
from replicax._ps.local_updates.replayed_exchange import EndOfLogError, ReplayedExchange
from replicax._ps.local_updates.replayed_rounds import ReplayedRounds
from replicax._ps.local_updates.training_group import LocalUpdates
from replicax._src.program_kit.errors import InvalidArgumentError, ReplayDifferenceError

_NAME: Final = "rx.testing.replay_groups"


@final
@dataclass(frozen=True)
class ReplayReport:
    """What a replay has repeated, all of it bit for bit.

    Attributes:
      processes: The number of processes of groups.
      versions: The number of outer parameters whose checksums were compared, of all fragments.
      pushes: The number of pushes, of which all that were answered were compared.
      adoptions: The number of adoptions.
    """

    processes: int
    versions: int
    pushes: int
    adoptions: int

    def __str__(self) -> str:
        return (
            f"{self.processes} processes repeated {self.pushes} pushes and {self.adoptions} adoptions; "
            f"{self.versions} versions of outer parameters are equal, bit for bit."
        )


def replay_groups(
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    train: Callable[[LocalUpdates], object],
    *,
    outer_optimizer: Any = None,
) -> ReplayReport:
    """Repeats a run of ``rx.experimental.LocalUpdates`` in this process, and compares it with the run, bit for bit.

    The logs say at which step each group has pushed and adopted what, and which pushes each round has. ``train`` is
    called for each process of a group, in a thread of its own; one runs at a time, until it needs a version that has
    pushes of another group. So groups run in another order than in the run, and nothing depends on time. The rounds
    are computed by the programs of the servers. A process that was killed ends where its log ends; the process that
    replaced it follows; a server that was restarted goes back to its snapshot. What is compared: the outer parameters
    of each version that a group has adopted, each push (all that a group has learned since its last one), and its rows.

    Groups of several processes are refused: their sums have other last bits in one process. ``train`` makes the model,
    the data and everything random from ``groups.index`` alone, as in the run, on the same devices; Python's and NumPy's
    global random states are kept apart. Global settings, as Keras's dtype policy, are made in ``train`` too.
    ``groups.should_stop`` is True at the last step of the run. ``groups.outer()`` has the outer parameters that were
    adopted last, and not those that had arrived: evaluations with it may print other numbers than in the run.

    Args:
      logs: A folder with ``group-0/replay.log`` and so on, as ``REPLICAX_CHECKPOINT_DIR`` of the launcher; or the
        files (``LocalUpdates(log=...)``) of all groups, in the order in which groups run.
      train: The training of a group. It gets a ``LocalUpdates`` with the settings of the run, calls ``attach``,
        ``step`` and ``finish``, or gives it to a ``LocalUpdatesCallback``.
      outer_optimizer: The transformation of optax, if the run had one.

    Raises:
      ReplayDifferenceError: The replay differs. It names the first difference: the group, the fragment, the version,
        and both checksums. It is an ``AssertionError``.
      InvalidArgumentError: The logs are not those of all groups of one run.
      MessageError: A file is no replay log.
      UnsupportedError: A group had several processes, or a server came back without a snapshot.

    >>> import os, tempfile, jax.numpy as jnp, replicax as rx
    >>> def train(groups):
    ...     params = groups.attach({"w": jnp.zeros(3)})
    ...     for _ in range(20):
    ...         params = groups.step({"w": params["w"] + 1 + groups.index}, tokens=8)
    ...     groups.finish()
    >>> folder = tempfile.mkdtemp()
    >>> with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as syncer:
    ...     os.environ |= {"REPLICAX_GROUP": "0/1", "REPLICAX_SYNCERS": syncer.target.removeprefix("grpc://")}
    ...     train(rx.experimental.LocalUpdates(every=5, fragments=1, log=f"{folder}/group-0/replay.log"))
    >>> del os.environ["REPLICAX_GROUP"], os.environ["REPLICAX_SYNCERS"]
    >>> rx.testing.replay_groups(folder, train).processes
    1
    """
    plan = ReplayPlan([read_replay_file(path) for path in _files(logs)])
    optimizer = _optimizer_of_run(plan, outer_optimizer)
    rounds = ReplayedRounds(plan)
    running = [_Running(process, plan, rounds, optimizer, train) for process in plan.processes]
    try:
        while any(not each.has_ended for each in running):
            ready = next((each for each in running if each.is_ready(running)), None)
            if ready is None:
                raise _stuck(running, rounds)
            ready.resume()
    finally:
        for each in running:
            each.end()
    for fragment, served in sorted(plan.rounds):
        rounds.has(fragment, served)
    counts = [each.counts for each in running]
    return ReplayReport(
        len(running),
        rounds.num_compared,
        sum(each["pushes"] for each in counts),
        sum(each["adoptions"] for each in counts),
    )


@final
class _Running:
    """A process of a group, as a thread that runs only inside of ``resume``."""

    def __init__(
        self,
        process: LoggedProcess,
        plan: ReplayPlan,
        rounds: ReplayedRounds,
        optimizer: Any,
        train: Callable[[LocalUpdates], object],
    ):
        self.process, self.has_ended = process, False
        self._plan, self._rounds, self._optimizer, self._train = plan, rounds, optimizer, train
        self.awaited: tuple[int, ServedVersion] | None = None  # the fragment and the version that it needs
        self._exchange: ReplayedExchange | None = None
        self._error: BaseException | None = None
        self._random = random.getstate(), np.random.get_state()
        self._goes, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"replay of {process.name}", daemon=True
        )

    @property
    def counts(self) -> dict[str, int]:
        """How often it has pushed and adopted."""
        return dict(self._exchange.statistics()) if self._exchange else {"pushes": 0, "adoptions": 0}

    def is_ready(self, everyone: Sequence[Self]) -> bool:
        """True if it can go on."""
        if self.has_ended:
            return False
        if self._thread.ident is None:
            mine = self.process
            earlier = [each for each in everyone if each.process.group == mine.group]
            return all(each.has_ended for each in earlier if each.process.process < mine.process)
        return self.awaited is None or self._rounds.has(*self.awaited)

    def resume(self) -> None:
        """Lets it run until it needs what is not there, or ends. Raises its error."""
        outside = random.getstate(), np.random.get_state()
        _set_random(self._random)
        try:
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._goes.release()
            self._rests.acquire()
        finally:
            self._random = random.getstate(), np.random.get_state()
            _set_random(outside)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ends it, wherever it is."""
        self._is_stopped = True
        if self._thread.ident is not None:
            self._goes.release()

    def _run(self) -> None:
        header = self.process.header
        groups = LocalUpdates.of_replay(
            self.process.group,
            self._plan.num_groups,
            self._join,
            every=header["every"],
            outer_optimizer=self._optimizer,
            fragments=sum(each["outer_optimizer"] != "None" for each in header["fragments"]),
            compression=header["compression"],
        )
        try:
            self._train(groups)
            self._check_end(groups)
        except EndOfLogError:
            pass
        except BaseException as error:
            error.add_note(f"In the replay of {self.process.name}.")
            self._error = error
        finally:
            groups.close()
            self.has_ended = True
            self._rests.release()

    def _check_end(self, groups: LocalUpdates) -> None:
        lacks = self.process.calls[-1] if self._exchange is None else self._exchange.lacks
        if lacks is not None:
            raise ReplayDifferenceError(
                f"The replay differs from the run: train returned for {self.process.name} after {groups.steps} steps, and in the "
                f"run it went on to step {self.process.calls[-1].step}. Give `train` the loop and the data of the run, with "
                "groups.finish() at its end."
            )

    def _join(
        self,
        steps: Callable[[], int],
        exchanged: Callable[[Sequence[AskServer]], list[ExchangedFragment]],
        place: PlaceOuter,
    ) -> ReplayedExchange:
        fragments = self._rounds.join(exchanged, len(self.process.header["fragments"]))
        self._exchange = ReplayedExchange(
            self.process, self._plan, self._rounds, fragments, place, steps, self._wait_for
        )
        return self._exchange

    def _wait_for(self, fragment: int, served: ServedVersion) -> None:
        self.awaited = fragment, served
        while not self._rounds.has(fragment, served):
            self._rests.release()
            self._goes.acquire()
            if self._is_stopped:
                raise EndOfLogError
        self.awaited = None


def _set_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _files(
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Sequence[str | os.PathLike[str]]:
    if not isinstance(logs, (str, os.PathLike)):
        return logs
    files = sorted(Path(logs).glob("group-*/replay.log"))
    if not files:
        raise InvalidArgumentError(
            f"{_NAME}: {os.fspath(logs)} has no group-0/replay.log. Give the folder that was REPLICAX_CHECKPOINT_DIR of the "
            "launcher, or a list of files."
        )
    return files


def _optimizer_of_run(plan: ReplayPlan, outer_optimizer: Any) -> Any:
    sgd = plan.processes[0].header["sgd"]
    logged = None if sgd is None else OuterSgd(*sgd)
    if logged is None and outer_optimizer is None:
        raise InvalidArgumentError(
            f"{_NAME}: the run had a transformation of optax, which a log cannot hold. Give outer_optimizer=."
        )
    if logged is not None and outer_optimizer is not None and outer_optimizer_of(outer_optimizer) != logged:
        raise InvalidArgumentError(
            f"{_NAME}(outer_optimizer=...): the run had {logged}. Leave it out: the log has it."
        )
    return outer_optimizer if logged is None else logged


def _stuck(running: Sequence[_Running], rounds: ReplayedRounds) -> InvalidArgumentError:
    waiting = [each for each in running if each.awaited is not None and not each.has_ended]
    whys = [
        f"{each.process.name} adopts version {each.awaited[1]} of fragment {each.awaited[0]}, but {rounds.missing(each.awaited[0])}"
        for each in waiting
        if each.awaited is not None
    ]
    return InvalidArgumentError(
        f"{_NAME}: the logs do not say how the run went on: {'; '.join(whys)}. Give the logs of all groups, from the beginning "
        "of the run."
    )
