"""``LocalUpdates``: groups that train alone, and exchange. Public as ``rx.experimental.LocalUpdates``."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from numbers import Real
from typing import Any, Final, Self, final

import jax
import jax.core
import jax.numpy as jnp

from replicax._ps.local_updates.attached_arrays import AttachedArrays
from replicax._ps.local_updates.background_exchange import AskServer, BackgroundExchange, ExchangedFragment
from replicax._ps.local_updates.fragment_programs import FragmentPrograms
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.fragment_split import allowed_steps, offsets_of
from replicax._ps.local_updates.fragment_values import move_at_once
from replicax._ps.local_updates.group_exchange import GroupExchange, JoinReplay
from replicax._ps.local_updates.group_fragments import GroupFragment, fragments_of
from replicax._ps.local_updates.group_positions import GroupPositions, ResumableData
from replicax._ps.local_updates.group_processes import GroupProcesses
from replicax._ps.local_updates.group_settings import GroupSettings
from replicax._ps.local_updates.group_status import show_groups
from replicax._ps.local_updates.outer_optimizer import (
    OuterSgd,
    OuterTransformation,
    outer_optimizer_of,
)
from replicax._ps.local_updates.replay_file import GroupCall, ReplayWriter
from replicax._ps.local_updates.syncers import Syncers
from replicax._ps.local_updates.unmerged_progress import Rebase
from replicax._src.program_kit.cluster_tasks import ServerSettings
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError, TraceError, user_line
from replicax._src.program_kit.texts import path_of
from replicax._src.program_kit.variables import use_imported

_logger = logging.getLogger("replicax")
_NAME: Final = "rx.experimental.LocalUpdates"
_COMPRESSIONS: Final = ("int8", None)
_FROZEN: Final = "frozen weight {} (all groups must load or seed it alike)"
_STOPPED_BEFORE: Final = (
    "Group %d: some group called groups.stop() before this process came, so the training ends at its first boundary. If that "
    "was in an earlier run, whose groups ended before `finish`, restart the syncers to begin another one."
)


@final
class LocalUpdates:
    """Trains in groups that never wait for each other: each runs many steps alone, and exchanges what it learned.

    Each group is a program of its own, with any strategy or none. After ``every`` steps it sends the change of its
    parameters to parameter servers, the *syncers*, in the background. When a ``quorum`` of groups has sent theirs, a
    *round* closes: the syncers apply the outer optimizer to the mean of the changes, weighted by the rows that each
    group has trained on. A group adopts the result when it arrives, and keeps what it has learned since. If a group or
    a syncer dies, the others go on.

    The environment says who the group is: ``REPLICAX_GROUP=1/4`` is the group with the number 1 of 4, from 0.
    ``REPLICAX_SYNCERS=host:port,host:port`` are the syncers. ``replicax launch --groups 4`` sets both. Without
    ``REPLICAX_GROUP`` the program runs unchanged as one group, and nothing is exchanged.

    Parameters of any floating dtype travel as float32; float64 is rounded. Arrays without gradients, as the statistics
    of BatchNorm, are a fragment of their own, of which groups take the mean. Integers and random keys stay in the
    group. So do frozen weights of a Keras model, which must be equal in all groups: those of layers with
    ``trainable=False``, those that a layer made trainable and that no longer are, and those of ``Normalization``.

    It does not compute what synchronous training computes: between two rounds groups train on different parameters.

    Args:
      every: The number of steps after which each fragment is exchanged.
      outer_optimizer: The update of a round: a ``keras.optimizers.SGD`` with a learning rate that is a number, momentum
        and nesterov; or a transformation of optax, to which each fragment is one vector. None is SGD(1.0, momentum=0.5,
        nesterov=True).
      fragments: The number of fragments of the parameters, which are exchanged one after the other: every 30 steps in 4
        fragments sends one of them every 7 or 8 steps.
      quorum: The number of groups that a round waits for, of those that are alive; all others have some time to follow.
        None is all but one, and at least one.
      compression: "int8" sends 8-bit integers with a scale for 256 values; None sends float32.
      grace_s: The seconds that a round with a quorum waits for the other groups that are alive; None takes them from
        the time between two exchanges.
      patience_s: The seconds after which a group that has sent nothing no longer counts as alive.
      log: The file of the replay log of this group, to which each process of it appends. None is ``replay.log`` in
        ``REPLICAX_CHECKPOINT_DIR`` if that is set, and no log otherwise.

    Raises:
      InvalidArgumentError: An argument is not allowed.
      ClusterEnvironmentError: ``REPLICAX_GROUP`` or ``REPLICAX_SYNCERS`` is not of its form, or only one is set.

    Source: "Decoupled DiLoCo" (arXiv 2604.21428).

    >>> import jax.numpy as jnp, replicax as rx
    >>> groups = rx.experimental.LocalUpdates(every=30, fragments=1)  # no REPLICAX_GROUP: one group
    >>> params = groups.attach({"w": jnp.zeros(3)})
    >>> for _ in range(60):
    ...     params = groups.step({"w": params["w"] + 1}, tokens=8)
    >>> groups.finish()["w"]
    Array([60., 60., 60.], dtype=float32)
    """

    def __init__(
        self,
        every: int = 30,
        outer_optimizer: Any = None,
        *,
        fragments: int = 4,
        quorum: int | None = None,
        compression: str | None = None,
        grace_s: float | None = None,
        patience_s: float = 60.0,
        log: str | os.PathLike[str] | None = None,
    ):
        use_imported()  # `model.fit` is looked up before a callback is made in its call
        self._set_up(
            ServerSettings(), None, every, outer_optimizer, fragments=fragments, quorum=quorum,
            compression=compression, grace_s=grace_s, patience_s=patience_s, log=log,
        )  # fmt: skip
        if self._place is None:
            _logger.info(
                "LocalUpdates: REPLICAX_GROUP is not set, so this program trains as one group. Nothing is exchanged."
            )

    @classmethod
    def of_replay(
        cls,
        index: int,
        num_groups: int,
        join: JoinReplay,
        *,
        every: int,
        outer_optimizer: Any,
        fragments: int,
        compression: str | None,
    ) -> Self:
        """Makes a group of a replay, whose exchange ``join`` makes. Private."""
        use_imported()
        groups = cls.__new__(cls)
        settings = ServerSettings({"REPLICAX_GROUP": f"{index}/{num_groups}", "REPLICAX_SYNCERS": "replay:1"})
        groups._set_up(
            settings, join, every, outer_optimizer, fragments=fragments, quorum=None,
            compression=compression, grace_s=None, patience_s=0.0, log=None,
        )  # fmt: skip
        return groups

    def _set_up(
        self,
        settings: ServerSettings,
        join: JoinReplay | None,
        every: int,
        outer_optimizer: Any,
        *,
        fragments: int,
        quorum: int | None,
        compression: str | None,
        grace_s: float | None,
        patience_s: float,
        log: str | os.PathLike[str] | None,
    ) -> None:
        self._join_replay = join
        self._log_path = settings.replay_file if log is None else path_of(log, "log", "replay.log")
        self._place = settings.group
        self._start_limit_s = settings.start_limit_s
        self._every = _at_least_1("every", every)
        self._num_fragments = _at_least_1("fragments", fragments)
        self._allowed_steps = allowed_steps(self._every, self._num_fragments)
        self._optimizer = outer_optimizer_of(outer_optimizer)
        if compression not in _COMPRESSIONS:
            raise InvalidArgumentError(
                f"{_NAME}(compression={compression!r}): it must be 'int8' or None (float32)."
            )
        self._compression = compression
        quorum = max(1, self.num_groups - 1) if quorum is None else _at_least_1("quorum", quorum)
        if self._place is not None and quorum > self.num_groups:
            raise InvalidArgumentError(
                f"{_NAME}(quorum={quorum}): there are {self.num_groups} groups (REPLICAX_GROUP), so no round would close. Give "
                f"a quorum from 1 to {self.num_groups}."
            )
        for name, seconds in (("grace_s", 0.0 if grace_s is None else grace_s), ("patience_s", patience_s)):
            if not isinstance(seconds, Real) or not float(seconds) >= 0:
                raise InvalidArgumentError(
                    f"{_NAME}({name}={seconds!r}): it must be a number of seconds of at least 0."
                )
        self._options = ExchangeOptions(quorum, grace_s, patience_s)
        self._attached: AttachedArrays | None = None
        self._params: Any = None  # the pytree of the last step
        self._fragments: list[GroupFragment] = []
        self._due: dict[int, list[int]] = {}  # the fragments of a boundary, by its step modulo ``every``
        self._processes: GroupProcesses | None = None
        self._positions: GroupPositions | None = None
        self._syncers: Syncers | None = None
        self._exchange: GroupExchange | None = None  # None in the processes that do not lead
        self._adopts_at_once: GroupExchange | None = None
        self._num_steps = self._num_tokens = self._version = 0
        self._num_free = 0  # the next steps that are at no boundary
        self._outer: dict[int, jax.Array] = {}  # in a group of several processes, as of its last boundary
        self._stops = self._wants_stop = self._is_finished = self._is_closed = self._is_outer = False

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return 1 if self._place is None else self._place.num_groups

    @property
    def index(self) -> int:
        """The number of this group, from 0."""
        return 0 if self._place is None else self._place.index

    @property
    def every(self) -> int:
        """The number of steps after which each fragment is exchanged."""
        return self._every

    @property
    def allowed_steps(self) -> Sequence[int]:
        """The numbers that ``steps`` of a call of ``step`` may have, and ``steps_per_execution`` of a Keras model."""
        return self._allowed_steps

    @property
    def steps(self) -> int:
        """The number of steps that this process has counted."""
        return self._num_steps

    @property
    def version(self) -> int:
        """The number of rounds that the parameters have, in all fragments. ``version * every`` is the job's clock."""
        return self._version

    @property
    def should_stop(self) -> bool:
        """True if some group has called ``stop``: end the training after this step."""
        return self._stops or (self._adopts_at_once is not None and self._adopts_at_once.stops)

    # --- the training -----------------------------------------------------------------------------------

    def attach(self, model: Any, *, data: ResumableData | None = None) -> Any:
        """Says what is exchanged, and adopts the outer parameters. The first group creates them from its own.

        Call it once, before the first step. It waits for the syncers, and not for other groups.

        Args:
          model: A Keras model that is built, an nnx model, a pytree of variables, or a pytree of arrays.
          data: The iterator over the group's data, with ``get_state`` and ``set_state``, as those of ``rx.data`` have.
            Its position is stored with each push, and a group that restarts moves it to that of its last push.

        Returns:
          The model; or the pytree with the outer parameters, to train on.

        Raises:
          UnavailableError: A syncer does not answer within ``REPLICAX_START_TIMEOUT_S`` (300 by default).
          InvalidArgumentError: There are fewer parameters than fragments, a variable is there twice, or another group
            has other parameters or settings.
          UnsupportedError: An array is in shards.
          ContextError: Something has been attached.
        """
        self._check_is_open("attach")
        if self._attached is not None:
            raise ContextError(
                f"{_NAME}.attach was called before. Attach all variables in one call, or make another LocalUpdates."
            )
        attached = AttachedArrays(model)
        if self._place is not None:
            self._begin(attached)
            assert self._processes is not None
            self._positions = GroupPositions(self._processes, data)
            if position := self._positions.resumed(lambda: self._leading.position):
                _logger.info(
                    "LocalUpdates: group %d has started again. Its last push was after %d steps and %d rows.",
                    self.index, position.steps, position.tokens,
                )  # fmt: skip
        self._attached = attached
        self._params = attached.tree if attached.is_pytree else None
        return self._params if attached.is_pytree else model

    def step(self, params: Any = None, *, tokens: int | None = None, steps: int = 1) -> Any:
        """Counts a step. Exchanges what is due, and adopts what has arrived; never waits for a syncer or another group.

        Args:
          params: The pytree of parameters after the step, if a pytree was attached. (If nothing was, the first step
            attaches it, and what it has learned counts only if this is the first group.)
          tokens: The rows, or tokens, that the group has trained on in it: the weight of the group in the mean.
          steps: The number of steps since the last call.

        Returns:
          The pytree to go on with; None for a model or variables, which have been assigned.

        Raises:
          InvalidArgumentError: ``tokens`` is missing or negative; boundaries are not between so many steps; or the
            model has other variables than those that were attached.
          ContextError: Nothing was attached, or ``finish`` or ``close`` was called.
          TraceError: It was called in a function that JAX traces, as in ``jax.jit`` or ``strategy.run``.
        """
        is_free = self._num_free and steps == 1 and (params is None) is (self._params is None)
        if not is_free or tokens is None or type(tokens) is not int or tokens < 0:
            return self._stepped(params, _tokens(tokens), steps)
        self._num_free -= 1
        self._num_steps += 1
        self._num_tokens += tokens
        if self._adopts_at_once is not None and self._adopts_at_once.fetched:
            return self._exchange_now((), params)
        self._params = params
        return params

    def wait(self, timeout_s: float = 600.0) -> Any:
        """Waits until the rounds close that have what this group has sent, and adopts the result.

        Groups that call it after each boundary, with a quorum of all groups, train in step: DiLoCo as it was first
        published; with ``every=1`` and SGD(1.0) synchronous training up to rounding.

        Returns:
          As for ``step``.

        Raises:
          WaitTimeoutError: It took longer.
        """
        self._checked(self._params)
        if self._processes is None:
            return self._params
        self._processes.awaited(lambda: self._leading.wait(timeout_s), self._call("wait"))
        return self._exchange_now((), self._params, GroupCall.WAIT)

    def stop(self) -> None:
        """Asks all groups to end at their next boundary: ``should_stop`` becomes True there.

        In a group of several processes any of them may call it.
        """
        self._wants_stop = True
        self._stops = self._stops or self._processes is None or not self._processes.are_several
        if self._exchange is not None:
            self._exchange.stop()

    def finish(self, timeout_s: float = 600.0) -> Any:
        """Sends the remaining progress, waits until all live groups have finished, and adopts the outer parameters.

        Returns:
          The pytree of outer parameters; None for a model or variables, which have been assigned.

        Raises:
          WaitTimeoutError: It took longer.
          ContextError: It was called before, or nothing was attached.
        """
        if self._is_finished:
            raise ContextError(f"{_NAME}.finish was called twice. Call it once, after the training.")
        self._check_is_open("finish")
        if self._attached is None:
            raise ContextError(
                f"{_NAME}.finish: nothing was attached. Call groups.attach(model) before the training."
            )
        if self._processes is not None:
            self._exchange_now(range(len(self._fragments)), self._params, GroupCall.FINISH)
            values = self._all_of_leader("finish", lambda: self._leading.finish(timeout_s))
            self._version = self._processes.agreed(lambda: self._leading.version)
            self._write(dict(enumerate(values)))
            self._params = self._attached.tree if self._attached.is_pytree else None
        self._is_finished = True
        self._end(leaves=True)
        return self._params

    @contextlib.contextmanager
    def outer(self) -> Iterator[Any]:
        """Context in which the model has the outer parameters that have arrived last, to evaluate or save them.

        The model, or the variables, have the group's own values again after it. Yields the model, or the pytree of
        outer parameters. In a group of several processes these are the parameters of the last boundary, and any of the
        processes may enter it.

        Raises:
          ContextError: Nothing was attached, or the context was entered before.
        """
        attached = self._attached
        if attached is None or self._is_outer:
            why = "it was entered before" if self._is_outer else "nothing was attached"
            raise ContextError(f"{_NAME}.outer: {why}.")
        if self._processes is None or self._is_closed:
            yield self._params if attached.is_pytree else attached.model
            return
        if attached.is_pytree:
            attached.replace(self._params)
        everything = [number for each in self._fragments for number in each.numbers]
        own = attached.read(everything)
        self._is_outer, self._num_free = True, 0
        self._write(self._outer if self._processes.are_several else dict(enumerate(self._leading.outer())))
        try:
            yield attached.tree if attached.is_pytree else attached.model
        finally:
            self._is_outer = False
            attached.write(everything, own)

    def statistics(self) -> Mapping[str, int]:
        """Returns the numbers of steps and of rows, the version, and counts of the exchange."""
        counts = {"steps": self._num_steps, "tokens": self._num_tokens, "version": self.version}
        for each in (self._exchange, self._syncers):
            counts |= {} if each is None else each.statistics()
        return counts

    def close(self) -> None:
        """Ends the exchange without ``finish``: what was not sent is lost. May be called again."""
        self._end(leaves=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the exchange -----------------------------------------------------------------------------------

    def _stepped(self, params: Any, count: int, steps: int) -> Any:
        """A step that is at a boundary, or that must be checked."""
        params = self._checked(params)
        if steps != 1:
            self._check_steps(steps)
        self._num_tokens += count
        self._num_steps += steps
        due: Sequence[int] = self._due.get(self._num_steps % self._every, ())
        if steps != 1 and not due:  # calls with different numbers of steps
            passed = range(self._num_steps - steps + 1, self._num_steps)
            due = [each for number in passed for each in self._due.get(number % self._every, ())]
        following = range(self._num_steps + 1, self._num_steps + self._every)
        of_boundaries = (at for at, number in enumerate(following) if number % self._every in self._due)
        self._num_free = next(of_boundaries, self._every - 1)
        if due or (self._adopts_at_once is not None and self._adopts_at_once.fetched):
            return self._exchange_now(due, params)
        self._params = params
        return params

    def _begin(self, attached: AttachedArrays) -> None:
        assert self._place is not None
        fragments = fragments_of(attached.specs, self._num_fragments, self._optimizer)
        offsets = [*offsets_of(self._every, self._num_fragments), 0]
        processes = GroupProcesses(attached.topology)
        values = [each.values.flat(attached.read(each.numbers)) for each in fragments]
        self._fragments, self._processes = fragments, processes
        try:
            adopted = self._all_of_leader("attach", lambda: self._connected(attached, values))
            self._version = processes.agreed(lambda: self._leading.version)
        except BaseException:
            self._processes = None
            self._end(leaves=False)
            raise
        for number in range(len(fragments)):
            self._due.setdefault(offsets[number], []).append(number)
        self._adopts_at_once = None if processes.are_several else self._exchange
        self._outer = dict(enumerate(adopted)) if processes.are_several else {}
        self._write(dict(enumerate(adopted)), attached)
        if self._exchange is not None and self._exchange.stops:
            _logger.warning(_STOPPED_BEFORE, self.index)
        for each in fragments:  # what boundaries compute is compiled now, for arrays as they are from now on
            own = each.values.flat(attached.read(each.numbers))
            jax.block_until_ready(move_at_once(own, own - own, own))
            jax.block_until_ready(each.values.moved(attached.read(each.numbers), own, own))
        _logger.info(
            "LocalUpdates: group %d of %d (from 0) exchanges %d fragments every %d steps through %s.",
            self.index, self.num_groups, len(fragments), self._every, ", ".join(self._place.syncers),
        )  # fmt: skip

    def _connected(self, attached: AttachedArrays, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Begins the exchange. Returns the outer parameters."""
        assert self._place is not None
        devices = [next(iter(each.devices())) for each in values]

        def place(fragment: int, outer: Any) -> jax.Array:
            return jax.device_put(outer, devices[fragment])

        if self._join_replay is not None:
            self._exchange = self._join_replay(lambda: self._num_steps, self._exchanged, place)
            return self._exchange.begin(values, self._start_limit_s)
        syncers = self._syncers = Syncers(self._place.syncers, self.index, self.num_groups)
        syncers.greet(self._start_limit_s)
        syncers.agree(self._settings(attached))
        exchange = self._exchange = BackgroundExchange(
            self.index,
            self.num_groups,
            self._exchanged(
                [syncers.asking(number % len(syncers)) for number in range(len(self._fragments))]
            ),
            self._options,
            place=place,
            move=move_at_once,
            log_of=None if self._log_path is None else self._replay_log,
        )
        show_groups(lambda: exchange.status(self.statistics()))
        return exchange.begin(values, self._start_limit_s)

    def _replay_log(self, owner: int) -> ReplayWriter:
        assert self._log_path is not None
        header = {
            "group": self.index,
            "num_groups": self.num_groups,
            "owner": owner,
            "has_several_processes": self._processes is not None and self._processes.are_several,
            "every": self._every,
            "compression": self._compression,
            "sgd": astuple(self._optimizer) if isinstance(self._optimizer, OuterSgd) else None,
            "fragments": [
                {
                    "arrays": list(each.numbers),
                    "size": each.values.size,
                    "outer_optimizer": str(each.optimizer)
                    if isinstance(each.optimizer, OuterSgd | None)
                    else "optax",
                }
                for each in self._fragments
            ],
        }
        return ReplayWriter(self._log_path, header)

    @property
    def _leading(self) -> GroupExchange:
        assert self._exchange is not None
        return self._exchange

    def _call(self, name: str) -> str:
        """Returns what this process calls, for the other processes of the group."""
        return f"groups.{name} after step {self._num_steps}"

    def _all_of_leader(self, name: str, make: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Returns the values of all fragments that ``make``, which may wait, returns in the leader of the group."""
        assert self._processes is not None
        made: list[jax.Array] = []
        self._processes.awaited(lambda: made.extend(make()), self._call(name))
        return made if not self._processes.are_several else self._shared(dict(enumerate(made)))

    def _shared(self, made: Mapping[int, jax.Array], numbers: Sequence[int] | None = None) -> list[jax.Array]:
        """Returns the leader's values of fragments, in all processes of the group."""
        assert self._processes is not None
        return [
            self._processes.shared(
                made[number] if number in made else jnp.zeros(self._fragments[number].values.size)
            )
            for number in (range(len(self._fragments)) if numbers is None else numbers)
        ]

    def _exchanged(self, asks: Sequence[AskServer]) -> list[ExchangedFragment]:
        return [
            each.exchanged_by(ask, self.num_groups, is_compressed=self._compression is not None)
            for each, ask in zip(self._fragments, asks)
        ]

    def _programs(self, number: int, **update: Any) -> FragmentPrograms:
        is_compressed = self._compression is not None
        return self._fragments[number].programs(self.num_groups, is_compressed=is_compressed, **update)

    def _settings(self, attached: AttachedArrays) -> GroupSettings:
        specs = attached.specs
        described = self._optimizer
        if isinstance(described, OuterTransformation):
            described = f"the program {self._programs(0, optimizer=described).close.digest}"
        return GroupSettings(
            self.index,
            [
                ("the number of groups", str(self.num_groups)),
                ("every", str(self._every)),
                ("fragments", str(self._num_fragments)),
                ("quorum", str(self._options.quorum)),
                ("compression", str(self._compression)),
                ("the number of parameters", str(len(specs))),
                *((f"parameter {at}", f"{spec.described}\t{spec.name}") for at, spec in enumerate(specs)),
                *(
                    (_FROZEN.format(at), f"{text}\t{name}")
                    for at, (name, text) in enumerate(attached.frozen())
                ),
                ("outer_optimizer", str(described)),
            ],
        )

    def _exchange_now(self, due: Sequence[int], params: Any, call: GroupCall = GroupCall.STEP) -> Any:
        """Exchanges the fragments that are due, and adopts those that have arrived."""
        attached, processes = self._attached, self._processes
        assert attached is not None
        assert processes is not None
        if attached.is_pytree:
            attached.replace(params)
        elif 0 in due:
            attached.check_not_replaced()
        position = None
        if due and self._positions is not None and call is GroupCall.STEP:  # later the data may be closed
            position = self._positions.now(self._num_steps, self._num_tokens)
        own: dict[int, jax.Array] = {}
        adopted: dict[int, jax.Array] = {}
        outer: Sequence[jax.Array] = ()
        has_written = False

        def exchange_own() -> list[int | bool]:
            nonlocal outer, has_written
            exchange = self._leading
            exchange.note_call(self._num_steps, call)
            if position is not None:
                exchange.note_position(position)
            for number in sorted({*due, *exchange.fetched}):
                fragment = self._fragments[number]
                if number not in due and not processes.are_several and (rebase := exchange.rebase(number)):
                    self._apply(rebase, fragment)
                    has_written = True
                    continue
                own[number] = fragment.values.flat(attached.read(fragment.numbers))
                if number in due:
                    tokens, fragment.tokens = self._num_tokens - fragment.tokens, self._num_tokens
                    new = exchange.boundary(number, own[number], tokens)
                else:
                    new = exchange.adopt(number, own[number])
                if new is not own[number]:
                    adopted[number] = new
            if processes.are_several and adopted:
                outer = exchange.outer()
            return [exchange.stops, exchange.version, *adopted]

        decided, some_want_stop = processes.agreed_with_wish(
            exchange_own, self._call(call.name.lower()), wish=self._wants_stop
        )
        stops, self._version, *numbers = decided
        if processes.are_several:
            attached.read(
                ()
            )  # Keras's loop begins its next step alike in all processes, as the leader has read values
            self._stops = self._stops or bool(stops) or some_want_stop
            if some_want_stop and self._exchange is not None:
                self._exchange.stop()  # another process of the group may have called it
            adopted = dict(zip(numbers, self._shared(adopted, numbers)))
            self._outer |= dict(zip(numbers, self._shared(dict(enumerate(outer)), numbers)))
        self._write(adopted)
        self._params = params
        if attached.is_pytree and (adopted or has_written):
            self._params = attached.tree
        return self._params

    def _apply(self, rebase: Rebase[Any], fragment: GroupFragment) -> None:
        """Adopts outer parameters of a fragment, in the usual case by one program."""
        attached, numbers, values = self._attached, fragment.numbers, fragment.values
        assert attached is not None
        arrays = attached.read(numbers)
        if rebase.is_move:
            attached.write(numbers, values.moved(arrays, rebase.before, rebase.base))
        else:
            attached.write(numbers, values.parts(rebase.applied(values.flat(arrays), move_at_once)))

    def _write(self, values: Mapping[int, Any], attached: AttachedArrays | None = None) -> None:
        attached = attached or self._attached
        assert attached is not None
        for number, flat in values.items():
            fragment = self._fragments[number]
            attached.write(fragment.numbers, fragment.values.parts(flat))

    def _end(self, *, leaves: bool) -> None:
        self._is_closed, self._num_free = True, 0
        if self._syncers is not None and not leaves:
            self._syncers.close(leaves=False)  # requests that wait for a syncer fail now
        if self._exchange is not None:
            show_groups(None)
            self._exchange.close()
        if self._syncers is not None and leaves:
            self._syncers.close(leaves=True)

    # --- checks -----------------------------------------------------------------------------------------

    def _check_is_open(self, what: str) -> None:
        if self._is_closed:
            why = "finish" if self._is_finished else "close"
            raise ContextError(
                f"{_NAME}.{what}: {why} was called before. Make another LocalUpdates to train again."
            )

    def _checked(self, params: Any) -> Any:
        """Checks that the group may train. Returns the parameters to go on with."""
        self._check_is_open("step")
        if not self._num_steps and isinstance(jnp.zeros(()), jax.core.Tracer):
            raise TraceError(
                f"{_NAME}.step was called at {user_line()} inside of a function that JAX traces, so it would run once and not "
                "in each step. Call it after that function, with what it returns: params = "
                "groups.step(train_step(params, batch), tokens=n)."
            )
        if self._is_outer:
            raise ContextError(
                f"{_NAME}.step was called inside of `with groups.outer():`. Train outside of it."
            )
        if self._attached is None:
            if params is None:
                raise ContextError(
                    f"{_NAME}.step: nothing was attached. Call groups.attach(model) before the training, or give the "
                    "parameters: params = groups.step(params, tokens=n)."
                )
            return self.attach(params)
        if (params is None) is self._attached.is_pytree:
            what = "params = groups.step(params, tokens=n)" if params is None else "groups.step(tokens=n)"
            raise InvalidArgumentError(
                f"{_NAME}.step: {type(self._attached.model).__name__} was attached, so write {what}."
            )
        return params

    def _check_steps(self, steps: int) -> None:
        if steps not in self.allowed_steps:
            raise InvalidArgumentError(
                f"{_NAME}.step(steps={steps}): with every={self._every} and fragments={self._num_fragments} there is a "
                f"boundary within so many steps. Allowed are {', '.join(map(str, self.allowed_steps))}; or choose `every` and "
                f"`fragments` so that every / fragments is a multiple of {max(steps, 1)}."
            )


def _at_least_1(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise InvalidArgumentError(f"{_NAME}({name}={value!r}): it must be a whole number of at least 1.")
    return number


def _tokens(tokens: int | None) -> int:
    if type(tokens) is int and tokens >= 0:
        return tokens
    try:
        number = -1 if tokens is None or isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidArgumentError(
            f"{_NAME}.step(tokens={tokens!r}): write groups.step(tokens=n) with the number of rows, or tokens, that the group "
            "has trained on in this step; at least 0. It is the weight of the group in the mean."
        )
    return number
