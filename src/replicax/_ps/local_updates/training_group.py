"""``LocalUpdates``: groups that train alone, and exchange. Public as ``rx.experimental.LocalUpdates``."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Final, Self, final

import jax
import jax.core
import jax.numpy as jnp

from replicax._ps.local_updates.attached_arrays import AttachedArrays
from replicax._ps.local_updates.exchanging_group import ExchangingGroup, GroupOptions, TrainedSoFar
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.fragment_split import allowed_steps
from replicax._ps.local_updates.group_exchange import GroupExchange, JoinReplay
from replicax._ps.local_updates.group_positions import ResumableData
from replicax._ps.local_updates.outer_optimizer import outer_optimizer_of
from replicax._src.program_kit.cluster_tasks import ServerSettings
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError, TraceError, user_line
from replicax._src.program_kit.texts import path_of
from replicax._src.program_kit.variables import use_imported

_logger = logging.getLogger("replicax")
_NAME: Final = "rx.experimental.LocalUpdates"
_COMPRESSIONS: Final = ("int8", None)


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
        nesterov=True). A round to which a group brings more than three times its usual rows adds the mean as it is.
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
        if not self._options.syncers:
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
        place = settings.group
        num_groups = 1 if place is None else place.num_groups
        every, fragments = _at_least_1("every", every), _at_least_1("fragments", fragments)
        if compression not in _COMPRESSIONS:
            raise InvalidArgumentError(
                f"{_NAME}(compression={compression!r}): it must be 'int8' or None (float32)."
            )
        quorum = max(1, num_groups - 1) if quorum is None else _at_least_1("quorum", quorum)
        if place is not None and quorum > num_groups:
            raise InvalidArgumentError(
                f"{_NAME}(quorum={quorum}): there are {num_groups} groups (REPLICAX_GROUP), so no round would close. Give "
                f"a quorum from 1 to {num_groups}."
            )
        for name, seconds in (("grace_s", 0.0 if grace_s is None else grace_s), ("patience_s", patience_s)):
            if not isinstance(seconds, Real) or not float(seconds) >= 0:
                raise InvalidArgumentError(
                    f"{_NAME}({name}={seconds!r}): it must be a number of seconds of at least 0."
                )
        self._options = GroupOptions(
            index=0 if place is None else place.index,
            num_groups=num_groups,
            syncers=() if place is None else place.syncers,
            every=every,
            num_fragments=fragments,
            optimizer=outer_optimizer_of(outer_optimizer),
            compression=compression,
            exchange=ExchangeOptions(quorum, grace_s, patience_s),
            log_path=settings.replay_file if log is None else path_of(log, "log", "replay.log"),
            start_limit_s=settings.start_limit_s,
            join_replay=join,
        )
        self._every, self._allowed_steps = every, allowed_steps(every, fragments)
        self._attached: AttachedArrays | None = None
        self._params: Any = None  # the pytree of the last step
        self._trained = TrainedSoFar()
        self._group: ExchangingGroup | None = None  # if something was attached, and is exchanged
        self._due: Mapping[int, Sequence[int]] = {}
        self._adopts_at_once: GroupExchange | None = None
        self._num_free = 0  # the next steps that are at no boundary
        self._wants_stop = self._is_finished = self._is_closed = self._is_outer = False

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self._options.num_groups

    @property
    def index(self) -> int:
        """The number of this group, from 0."""
        return self._options.index

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
        return self._trained.steps

    @property
    def version(self) -> int:
        """The number of rounds that the parameters have, in all fragments. ``version * every`` is the job's clock."""
        return 0 if self._group is None else self._group.version

    @property
    def should_stop(self) -> bool:
        """True if some group has called ``stop``: end the training after this step."""
        return self._wants_stop if self._group is None else self._group.stops

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
        if self._options.syncers:
            self._begin(attached, data)
        self._attached = attached
        self._params = attached.tree if attached.is_pytree else None
        return self._params if attached.is_pytree else model

    def step(self, params: Any = None, *, tokens: int | None = None, steps: int = 1) -> Any:
        """Counts a step. Exchanges what is due, and adopts what has arrived; never waits for a syncer or another group.

        At a boundary it waits for the group's own device, which may have steps to do that the program began before.

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
        trained = self._trained
        self._num_free -= 1
        trained.steps += 1
        trained.tokens += tokens
        if self._adopts_at_once is not None and self._adopts_at_once.fetched:
            return self._exchanged((), params)
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
        if self._group is not None:
            self._params = self._group.wait(self._params, timeout_s)
        return self._params

    def stop(self) -> None:
        """Asks all groups to end at their next boundary: ``should_stop`` becomes True there.

        In a group of several processes any of them may call it.
        """
        self._wants_stop = True
        if self._group is not None:
            self._group.stop()

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
        if self._group is not None:
            self._group.finish(self._params, timeout_s)
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
        if self._group is None or self._is_closed:
            yield self._params if attached.is_pytree else attached.model
            return
        self._num_free = 0
        with self._group.outer(self._params):
            self._is_outer = True
            try:
                yield attached.tree if attached.is_pytree else attached.model
            finally:
                self._is_outer = False

    def statistics(self) -> Mapping[str, int]:
        """Returns the numbers of steps and of rows, the version, and counts of the exchange."""
        if self._group is not None:
            return self._group.statistics()
        return {"steps": self._trained.steps, "tokens": self._trained.tokens, "version": 0}

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
        trained = self._trained
        trained.tokens += count
        trained.steps += steps
        due: Sequence[int] = self._due.get(trained.steps % self._every, ())
        if steps != 1 and not due:  # calls with different numbers of steps
            passed = range(trained.steps - steps + 1, trained.steps)
            due = [each for number in passed for each in self._due.get(number % self._every, ())]
        following = range(trained.steps + 1, trained.steps + self._every)
        of_boundaries = (at for at, number in enumerate(following) if number % self._every in self._due)
        self._num_free = next(of_boundaries, self._every - 1)
        if due or (self._adopts_at_once is not None and self._adopts_at_once.fetched):
            return self._exchanged(due, params)
        self._params = params
        return params

    def _exchanged(self, due: Sequence[int], params: Any) -> Any:
        assert self._group is not None
        self._params = self._group.exchange(due, params)
        return self._params

    def _begin(self, attached: AttachedArrays, data: ResumableData | None) -> None:
        group = ExchangingGroup(self._options, attached, self._trained)
        try:
            group.begin(data)
        except BaseException:
            self._is_closed = True
            group.end(leaves=False)
            raise
        self._group, self._due, self._adopts_at_once = group, group.due, group.adopts_at_once
        if self._wants_stop:
            group.stop()

    def _end(self, *, leaves: bool) -> None:
        self._is_closed, self._num_free = True, 0
        if self._group is not None:
            self._group.end(leaves=leaves)

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
        if not self._trained.steps and isinstance(jnp.zeros(()), jax.core.Tracer):
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
                f"{_NAME}.step(steps={steps}): with every={self._every} and fragments={self._options.num_fragments} there is a "
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
