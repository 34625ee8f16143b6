"""``ExchangingGroup``: what the processes of a group do together at each boundary.

``training_group.py`` has the public object, which checks calls and counts the steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp

from replicax._ps.local_updates.attached_arrays import AttachedArrays
from replicax._ps.local_updates.background_exchange import AskServer, BackgroundExchange, ExchangedFragment
from replicax._ps.local_updates.fragment_programs import FragmentPrograms
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.fragment_split import offsets_of
from replicax._ps.local_updates.fragment_values import move_at_once
from replicax._ps.local_updates.group_exchange import GroupExchange, JoinReplay
from replicax._ps.local_updates.group_fragments import GroupFragment, fragments_of
from replicax._ps.local_updates.group_positions import GroupPositions, ResumableData
from replicax._ps.local_updates.group_processes import GroupProcesses
from replicax._ps.local_updates.group_settings import GroupSettings
from replicax._ps.local_updates.group_status import show_groups
from replicax._ps.local_updates.outer_optimizer import OuterOptimizer, OuterSgd, OuterTransformation
from replicax._ps.local_updates.replay_file import GroupCall, ReplayWriter
from replicax._ps.local_updates.syncers import Syncers
from replicax._ps.local_updates.unmerged_progress import Rebase

_logger = logging.getLogger("replicax")
_FROZEN: Final = "frozen weight {} (all groups must load or seed it alike)"
_STOPPED_BEFORE: Final = (
    "Group %d: some group called groups.stop() before this process came, so the training ends at its first boundary. If that "
    "was in an earlier run, whose groups ended before `finish`, restart the syncers to begin another one."
)


@final
@dataclass(frozen=True)
class GroupOptions:
    """The arguments of ``LocalUpdates``, checked, and what the environment says.

    Attributes:
      index, num_groups: The number of the group, from 0, and of all groups.
      syncers: The addresses of the syncers.
      log_path: The file of the replay log, if there is one.
      start_limit_s: The longest wait for a syncer at the start.
      join_replay: Makes the exchange of a replay; None otherwise.
    """

    index: int
    num_groups: int
    syncers: Sequence[str]
    every: int
    num_fragments: int
    optimizer: OuterOptimizer
    compression: str | None
    exchange: ExchangeOptions
    log_path: str | None
    start_limit_s: float
    join_replay: JoinReplay | None


@final
@dataclass
class TrainedSoFar:
    """What a process has counted: its steps, and the rows that its group has trained on."""

    steps: int = 0
    tokens: int = 0


@final
class ExchangingGroup:
    """A group with attached arrays, which exchanges. All its processes make the same calls.

    Args:
      options: Which group it is, and how it exchanges.
      attached: What it exchanges.
      trained: What the process counts.

    Raises:
      InvalidArgumentError: There are fewer parameters than fragments.
      UnsupportedError: The strategy of the group goes on after failures of processes.
      ContextError: The group has several processes, and what was attached is of one.

    Attributes:
      due: The fragments of a boundary, by its step modulo ``every``.
      adopts_at_once: The exchange of a group of one process, which adopts between boundaries too; otherwise None.
      version: The number of rounds that the parameters have, in all fragments.
    """

    def __init__(self, options: GroupOptions, attached: AttachedArrays, trained: TrainedSoFar):
        self._options, self._attached, self._trained = options, attached, trained
        self._fragments = fragments_of(attached.specs, options.num_fragments, options.optimizer)
        self._processes = GroupProcesses(attached.topology)
        self._positions: GroupPositions | None = None
        self._syncers: Syncers | None = None
        self._exchange: GroupExchange | None = None  # None in the processes that do not lead
        self._outer: Mapping[int, jax.Array] = {}  # in a group of several processes, as of its last boundary
        self._stops = self._wants_stop = False
        self.due: dict[int, list[int]] = {}
        offsets = [*offsets_of(options.every, options.num_fragments), 0]
        for number in range(len(self._fragments)):
            self.due.setdefault(offsets[number], []).append(number)
        self.adopts_at_once: GroupExchange | None = None
        self.version = 0

    def begin(self, data: ResumableData | None) -> None:
        """Joins the other groups, and adopts the outer parameters. Waits for the syncers.

        Args:
          data: See ``LocalUpdates.attach``.
        """
        options, attached, processes = self._options, self._attached, self._processes
        values = [each.values.flat(attached.read(each.numbers)) for each in self._fragments]
        adopted = self._all_of_leader("attach", lambda: self._connected(values))
        self.version = processes.agreed(lambda: self._leading.version)
        self.adopts_at_once = None if processes.are_several else self._exchange
        self._outer = dict(enumerate(adopted)) if processes.are_several else {}
        self._write(dict(enumerate(adopted)))
        # What boundaries compute is compiled now, for arrays as they are from now on.
        for each in self._fragments:
            own = each.values.flat(attached.read(each.numbers))
            jax.block_until_ready(move_at_once(own, own - own, own))
            jax.block_until_ready(each.values.moved(attached.read(each.numbers), own, own))
        _logger.info(
            "LocalUpdates: group %d of %d (from 0) exchanges %d fragments every %d steps through %s.",
            options.index, options.num_groups, len(self._fragments), options.every, ", ".join(options.syncers),
        )  # fmt: skip
        if self._exchange is not None and self._exchange.stops:
            _logger.warning(_STOPPED_BEFORE, options.index)
        self._positions = GroupPositions(processes, data)
        if position := self._positions.resumed(lambda: self._leading.position):
            _logger.info(
                "LocalUpdates: group %d has started again. Its last push was after %d steps and %d rows.",
                options.index, position.steps, position.tokens,
            )  # fmt: skip

    @property
    def stops(self) -> bool:
        """True if some group has called ``stop``, as far as this process may know at this step."""
        return self._stops or (self.adopts_at_once is not None and self.adopts_at_once.stops)

    def stop(self) -> None:
        """Asks all groups to end at their next boundary."""
        self._wants_stop = True
        self._stops = self._stops or not self._processes.are_several
        if self._exchange is not None:
            self._exchange.stop()

    def exchange(self, due: Sequence[int], params: Any, call: GroupCall = GroupCall.STEP) -> Any:
        """Exchanges the fragments that are due, and adopts those that have arrived.

        Args:
          due: The fragments.
          params: The group's parameters, if a pytree was attached.
          call: What the program calls.

        Returns:
          The parameters to go on with.
        """
        attached, processes, trained = self._attached, self._processes, self._trained
        if attached.is_pytree:
            attached.replace(params)
        elif 0 in due:
            attached.check_not_replaced()
        position = None
        if due and self._positions is not None and call is GroupCall.STEP:  # later the data may be closed
            position = self._positions.now(trained.steps, trained.tokens)
        own: dict[int, jax.Array] = {}
        adopted: dict[int, jax.Array] = {}
        outer: Sequence[jax.Array] = ()
        has_written = False

        def exchange_own() -> list[int | bool]:
            nonlocal outer, has_written
            exchange = self._leading
            exchange.note_call(trained.steps, call)
            if position is not None:
                exchange.note_position(position)
            for number in sorted({*due, *exchange.fetched}):
                fragment = self._fragments[number]
                if number not in due and not processes.are_several and (rebase := exchange.rebase(number)):
                    self._apply(rebase, fragment)
                    has_written = True
                    continue
                arrays = attached.read(fragment.numbers)
                if number in due:
                    # A loop that reads no results is many steps ahead of its device, and what it adopts comes as late.
                    jax.block_until_ready(arrays)
                own[number] = fragment.values.flat(arrays)
                if number in due:
                    tokens, fragment.tokens = trained.tokens - fragment.tokens, trained.tokens
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
        stops, self.version, *numbers = decided
        if processes.are_several:
            # Keras's loop begins its next step alike in all processes, as the leader has read values.
            attached.read(())
            self._stops = self._stops or bool(stops) or some_want_stop
            if some_want_stop and self._exchange is not None:
                self._exchange.stop()  # another process of the group may have called it
            adopted = dict(zip(numbers, self._shared(adopted, numbers)))
            self._outer = {**self._outer, **dict(zip(numbers, self._shared(dict(enumerate(outer)), numbers)))}
        self._write(adopted)
        return attached.tree if attached.is_pytree and (adopted or has_written) else params

    def wait(self, params: Any, timeout_s: float) -> Any:
        """Waits until the rounds close that have what the group has sent. Returns the parameters to go on with."""
        self._processes.awaited(lambda: self._leading.wait(timeout_s), self._call("wait"))
        return self.exchange((), params, GroupCall.WAIT)

    def finish(self, params: Any, timeout_s: float) -> None:
        """Sends the rest, waits until all live groups have finished, and adopts the outer parameters."""
        self.exchange(range(len(self._fragments)), params, GroupCall.FINISH)
        values = self._all_of_leader("finish", lambda: self._leading.finish(timeout_s))
        self.version = self._processes.agreed(lambda: self._leading.version)
        self._write(dict(enumerate(values)))
        if self._syncers is not None and self._leading.finished[:1] == [self._options.index]:
            self._syncers.snapshot()

    @contextlib.contextmanager
    def outer(self, params: Any) -> Iterator[None]:
        """Context in which the arrays have the outer parameters that have arrived last."""
        attached = self._attached
        if attached.is_pytree:
            attached.replace(params)
        everything = [number for each in self._fragments for number in each.numbers]
        own = attached.read(everything)
        self._write(self._outer if self._processes.are_several else dict(enumerate(self._leading.outer())))
        try:
            yield
        finally:
            attached.write(everything, own)

    def statistics(self) -> Mapping[str, int]:
        """Returns the numbers of steps and of rows, the version, and counts of the exchange."""
        counts = {"steps": self._trained.steps, "tokens": self._trained.tokens, "version": self.version}
        for each in (self._exchange, self._syncers):
            counts |= {} if each is None else each.statistics()
        return counts

    def end(self, *, leaves: bool) -> None:
        """Ends the exchange. May be called again.

        Args:
          leaves: True if the group has finished, and tells the syncers.
        """
        if self._syncers is not None and not leaves:
            self._syncers.close()  # requests that wait for a syncer fail now
        have_all_finished = False
        if self._exchange is not None:
            show_groups(None)
            have_all_finished = leaves and len(self._exchange.finished) == self._options.num_groups
            self._exchange.close()
        if self._syncers is not None and leaves:
            self._syncers.leave(waits=have_all_finished)

    # --- the beginning ----------------------------------------------------------------------------------

    def _connected(self, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Begins the exchange. Returns the outer parameters."""
        options, trained = self._options, self._trained
        devices = [next(iter(each.devices())) for each in values]

        def put(fragment: int, outer: Any) -> jax.Array:
            return jax.device_put(outer, devices[fragment])

        if options.join_replay is not None:
            self._exchange = options.join_replay(lambda: trained.steps, self._exchanged, put)
            return self._exchange.begin(values, options.start_limit_s)
        syncers = self._syncers = Syncers(options.syncers, options.index, options.num_groups)
        syncers.greet(options.start_limit_s)
        syncers.agree(self._settings())
        exchange = self._exchange = BackgroundExchange(
            options.index,
            options.num_groups,
            self._exchanged(
                [syncers.asking(number % len(syncers)) for number in range(len(self._fragments))]
            ),
            options.exchange,
            place=put,
            move=move_at_once,
            log_of=None if options.log_path is None else self._replay_log,
        )
        show_groups(lambda: exchange.status(self.statistics()))
        return exchange.begin(values, options.start_limit_s)

    def _replay_log(self, owner: int) -> ReplayWriter:
        options = self._options
        assert options.log_path is not None
        header = {
            "group": options.index,
            "num_groups": options.num_groups,
            "owner": owner,
            "has_several_processes": self._processes.are_several,
            "every": options.every,
            "compression": options.compression,
            "sgd": astuple(options.optimizer) if isinstance(options.optimizer, OuterSgd) else None,
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
        return ReplayWriter(options.log_path, header)

    def _exchanged(self, asks: Sequence[AskServer]) -> list[ExchangedFragment]:
        return [
            each.exchanged_by(
                ask, self._options.num_groups, is_compressed=self._options.compression is not None
            )
            for each, ask in zip(self._fragments, asks)
        ]

    def _programs(self, number: int, **update: Any) -> FragmentPrograms:
        is_compressed = self._options.compression is not None
        return self._fragments[number].programs(
            self._options.num_groups, is_compressed=is_compressed, **update
        )

    def _settings(self) -> GroupSettings:
        options, attached = self._options, self._attached
        specs, described = attached.specs, options.optimizer
        if isinstance(described, OuterTransformation):
            described = f"the program {self._programs(0, optimizer=described).close.digest}"
        return GroupSettings(
            options.index,
            [
                ("the number of groups", str(options.num_groups)),
                ("every", str(options.every)),
                ("fragments", str(options.num_fragments)),
                ("quorum", str(options.exchange.quorum)),
                ("compression", str(options.compression)),
                ("the number of parameters", str(len(specs))),
                *((f"parameter {at}", f"{spec.described}\t{spec.name}") for at, spec in enumerate(specs)),
                *(
                    (_FROZEN.format(at), f"{text}\t{name}")
                    for at, (name, text) in enumerate(attached.frozen())
                ),
                ("outer_optimizer", str(described)),
            ],
        )

    # --- the leader, and its values ---------------------------------------------------------------------

    @property
    def _leading(self) -> GroupExchange:
        assert self._exchange is not None
        return self._exchange

    def _call(self, name: str) -> str:
        """Returns what this process calls, for the other processes of the group."""
        return f"groups.{name} after step {self._trained.steps}"

    def _all_of_leader(self, name: str, make: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Returns the values of all fragments that ``make``, which may wait, returns in the leader of the group."""
        made: list[jax.Array] = []
        self._processes.awaited(lambda: made.extend(make()), self._call(name))
        return made if not self._processes.are_several else self._shared(dict(enumerate(made)))

    def _shared(self, made: Mapping[int, jax.Array], numbers: Sequence[int] | None = None) -> list[jax.Array]:
        """Returns the leader's values of fragments, in all processes of the group."""
        return [
            self._processes.shared(
                made[number] if number in made else jnp.zeros(self._fragments[number].values.size)
            )
            for number in (range(len(self._fragments)) if numbers is None else numbers)
        ]

    def _apply(self, rebase: Rebase[Any], fragment: GroupFragment) -> None:
        """Adopts outer parameters of a fragment, in the usual case by one program."""
        attached, numbers, values = self._attached, fragment.numbers, fragment.values
        arrays = attached.read(numbers)
        if rebase.is_move:
            attached.write(numbers, values.moved(arrays, rebase.before, rebase.base))
        else:
            attached.write(numbers, values.parts(rebase.applied(values.flat(arrays), move_at_once)))

    def _write(self, values: Mapping[int, Any]) -> None:
        for number, flat in values.items():
            fragment = self._fragments[number]
            self._attached.write(fragment.numbers, fragment.values.parts(flat))
