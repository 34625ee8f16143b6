"""Tracks the current strategy, and whether the caller is the cross-replica program or one replica.

There are three contexts per thread, as in tf.distribute: the default one (no strategy), cross-replica context (in a
strategy's scope or in ``merge_call``), and replica context (in a function that ``Strategy.run`` runs).
This module only passes strategies through and does not depend on their kind.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax

from replicax._src.collectives import in_replica
from replicax._src.collectives.in_replica import Communicator, OneReplica
from replicax._src.hooks import hook
from replicax._src.scope.any_strategy import AnyStrategy, StrategyView
from replicax._src.tracing.key import unwrap
from replicax._src.user.listening import listener
from replicax._src.user.tracebacks import boundary
from replicax._src.values.distributed import DistributedValues, Mirrored, PerReplica, is_value
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import (
    ContextError,
    CrossReplicaContextError,
    InvalidArgumentError,
    IterationContextError,
    KerasScopeError,
    MixedStrategiesError,
    ReplicaContextError,
    ScopeNestingError,
    UnsupportedError,
)
from replicax._src.vocabulary.options import CommunicationOptions, ReduceOp

log = logging.getLogger("replicax")


class _Frame(NamedTuple):
    """One entry of the context stack: a strategy, and the replica context if there is one."""

    strategy: AnyStrategy
    replica_context: ReplicaContext | None
    communicator: Communicator | None = None  # only in merge_call
    is_update: bool = False
    view: StrategyView | None = None  # through which the strategy is seen


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.no_variables: str | None = None
        self.no_iteration: str | None = None


_local = _Local()
_global_strategy: AnyStrategy | None = None
_default: list[Any] = []  # the default strategy, after its first use


def set_default_strategy(strategy: AnyStrategy) -> None:
    """Registers the one default strategy.

    Raises:
      ContextError: There is a default strategy already.
    """
    if _default:
        raise ContextError(
            f"{type(strategy).__name__}() was called, but there is only one default strategy. rx.get_strategy() returns it outside "
            "of every scope. For a separate strategy on one device make rx.OneDeviceStrategy('cpu:0')."
        )
    _default.append(strategy)


def _default_strategy() -> Any:
    if not _default:
        hook("default_strategy")  # the module makes it
    return _default[0]


def _top() -> _Frame | None:
    frames = _local.frames
    return frames[-1] if frames else None


def _push(
    strategy: AnyStrategy,
    replica_context: ReplicaContext | None,
    communicator: Communicator | None = None,
    *,
    is_update: bool = False,
    view: StrategyView | None = None,
) -> None:
    """Enters a context. A strategy that is seen through a view stays so, unless ``view`` is another."""
    view = view or view_of(strategy)
    _local.frames.append(_Frame(strategy, replica_context, communicator, is_update, view))


def get_strategy() -> Any:
    """Returns the current strategy: that of the innermost scope, the global strategy, or the default strategy.

    Call it in any context, from any thread (scopes are per thread).
    """
    top = _top()
    if top is not None:
        return top.strategy
    return _global_strategy if _global_strategy is not None else _default_strategy()


def has_strategy() -> bool:
    """Returns True if the current strategy is not the default one."""
    return get_strategy() is not _default_strategy()


def get_replica_context() -> (
    ReplicaContext | Any
):  # Any instead of None, so that a replica function need not check for None
    """Returns the current replica's context.

    Returns:
      The replica's context inside ``Strategy.run``; None in a scope or in ``merge_call``; the default strategy's
      context (one replica, id 0) outside any scope.
    """
    top = _top()
    if top is not None:
        return top.replica_context
    if _global_strategy is not None:
        return None
    return ReplicaContext(_default_strategy(), 0)


def in_cross_replica_context() -> bool:
    """Returns True if the caller is in cross-replica context: in a scope or in ``merge_call``."""
    return get_replica_context() is None


def in_replica_function() -> bool:
    """Returns True if the caller is inside a function that ``Strategy.run`` runs, and not in its ``merge_call``."""
    top = _top()
    return (
        top is not None and top.replica_context is not None and top.replica_context.communicator is not None
    )


def in_update() -> bool:
    """Returns True if the caller is inside ``extended.update``, where variables are read and written as stored."""
    top = _top()
    return top is not None and top.is_update


def merge_communicator() -> Communicator | None:
    """Returns the communicator of the replicas if the caller is inside their ``merge_call``; else None."""
    top = _top()
    return top.communicator if top is not None else None


def experimental_set_strategy(strategy: AnyStrategy) -> None:
    """Makes ``strategy`` current without ``with strategy.scope()``. None undoes it.

    Import Keras before. If Keras is imported later, its models belong to no strategy.

    Raises:
      ScopeNestingError: It is called inside a scope.
    """
    global _global_strategy
    if _local.frames:
        raise ScopeNestingError(
            "Must not be called inside a `tf.distribute.Strategy` scope (rx.experimental_set_strategy): leave the "
            "`with strategy.scope():` block first."
        )
    use_imported()
    _global_strategy = None if strategy is None or strategy is _default_strategy() else strategy


class Scope:
    """Cross-replica context of a strategy. The context manager may be entered again and nested in itself.

    Args:
      made_at: The user's line that made the scope. If the scope is dropped before it is entered, a warning names it.
      view: A view of the strategy. In the scope the strategy has its parts.
    """

    def __init__(self, strategy: AnyStrategy, made_at: str | None = None, view: StrategyView | None = None):
        self._strategy, self._view = strategy, view
        self._made_at = made_at
        self._is_of_user = made_at is not None
        self._had_keras: list[bool] = []  # a scope may be entered in itself

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:  # at the end `sys` is None
        if self._made_at is not None and not is_finalizing():
            log.warning(
                "%s: strategy.scope() alone has no effect. Write `with strategy.scope():`, and make variables, models and "
                "optimizers in its block.",
                self._made_at,
            )

    def __enter__(self) -> Any:
        self._made_at = None
        use_imported()
        strategy = self._strategy
        check_may_enter(strategy)
        self._had_keras.append("keras" in sys.modules)
        replica = (
            ReplicaContext(strategy, 0) if strategy is _default_strategy() else None
        )  # it changes nothing
        top = _top()
        if (
            top is not None and top.strategy is strategy
        ):  # it may be in merge_call or update, which are still active
            _push(strategy, replica, top.communicator, is_update=top.is_update, view=self._view)
        else:
            _push(strategy, replica, view=self._view)
        return strategy

    @boundary  # it may replace an error of the block
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        _local.frames.pop()
        had_keras = self._had_keras.pop()
        if not self._is_of_user:
            return
        if error is not None:
            found = listener().failed_in_scope(error)
            if found is not None:
                raise found from None
        if had_keras or not _has_unowned_of_keras():
            return
        text = (
            f"Keras was imported inside the scope of {self._strategy!r}, which does not track what Keras makes there: models made "
            "in it, and trained in it, are on one device. Import keras above `with strategy.scope():`."
        )
        if error is None:
            raise KerasScopeError(text)
        error.add_note(f"({text})")


def _has_unowned_of_keras() -> bool:
    """Returns True if there is a Keras variable or model that no strategy owns. It is slow, and for a rare case."""
    keras = sys.modules.get("keras")
    kinds = () if keras is None else (keras.Variable, keras.Model)
    return any(issubclass(type(each), kinds) and id(each) not in _owners for each in gc.get_objects())


def check_may_enter(strategy: AnyStrategy) -> StrategyView | None:
    """Raises unless ``strategy`` may be used in cross-replica context here. Returns ``view_of(strategy)``.

    Raises:
      MixedStrategiesError: The call is inside another strategy's scope.
      ScopeNestingError: The default strategy is used inside another's scope.
      CrossReplicaContextError: The call is inside a replica function.
    """
    top = _top()
    if top is None:
        if _global_strategy is not None and _global_strategy is not strategy:
            raise _mixed(_global_strategy, strategy)
    elif in_replica_function():
        if top.strategy is not strategy:
            raise _mixed(top.strategy, strategy)
        raise CrossReplicaContextError(
            "Method requires being in cross-replica context, use get_replica_context().merge_call(). You are "
            "inside a function that strategy.run runs: scope, run, reduce and gather belong outside of it; "
            "inside use rx.get_replica_context().all_reduce, all_gather or merge_call."
        )
    elif top.strategy is not strategy and top.strategy is not _default_strategy():
        if strategy is _default_strategy():
            raise ScopeNestingError(
                f"Must not nest tf.distribute.Strategy scopes: the default strategy's scope was entered inside "
                f"the scope of {top.strategy!r}."
            )
        raise _mixed(top.strategy, strategy)
    return top.view if top is not None and top.strategy is strategy else None


def _mixed(current: Any, other: Any) -> MixedStrategiesError:
    return MixedStrategiesError(
        f"Mixing different tf.distribute.Strategy objects: {current!r} is not {other!r}. Leave the scope (or "
        f"run) of the one before you use the other."
    )


def check_strategy_of(owner: Any | None, what: str) -> None:
    """Raises if a value made in the scope of ``owner`` is used under another strategy."""
    top = _top()
    current = top.strategy if top is not None else _global_strategy
    if owner is None or current is None or current is owner or owner is _default_strategy():
        return
    raise MixedStrategiesError(
        f"Mixing different tf.distribute.Strategy objects: {what} was made in the scope of {owner!r} and is "
        f"used under {current!r}. Make it in that strategy's scope, or outside every scope."
    )


def strategy_for_new_variable() -> Any:
    """Returns the strategy that variables made now belong to.

    Raises:
      MixedStrategiesError: Scopes of two strategies are open.
      InvalidArgumentError: ``no_new_variables`` is active.
    """
    if _local.no_variables is not None:
        raise InvalidArgumentError(_local.no_variables)
    for frame in _local.frames:
        if frame.strategy is not _local.frames[-1].strategy:
            raise _mixed(frame.strategy, _local.frames[-1].strategy)
    return get_strategy()


@contextlib.contextmanager
def no_new_variables(reason: str) -> Iterator[None]:
    """Context in which this thread cannot make variables; errors give ``reason``."""
    before, _local.no_variables = _local.no_variables, reason
    try:
        yield
    finally:
        _local.no_variables = before


@contextlib.contextmanager
def no_iteration(reason: str) -> Iterator[None]:
    """Context in which this thread cannot iterate distributed datasets; errors give ``reason``."""
    before, _local.no_iteration = _local.no_iteration, reason
    try:
        yield
    finally:
        _local.no_iteration = before


def check_may_iterate() -> None:
    """Raises if distributed datasets cannot be iterated here.

    Raises:
      InvalidArgumentError: ``no_iteration`` is active.
      IterationContextError: The caller is in a replica function.
    """
    if _local.no_iteration is not None:
        raise InvalidArgumentError(_local.no_iteration)
    if in_replica_function():
        raise IterationContextError(
            "next(iterator) should be called from outside of replica_fn: a distributed dataset was iterated inside a "
            "function that strategy.run runs. Take the batch outside and pass it: strategy.run(fn, args=(batch,))."
        )


def view_of(strategy: AnyStrategy) -> StrategyView | None:
    """Returns the view of ``strategy`` in whose scope the caller is; None if the strategy has its own parts."""
    top = _top()
    return top.view if top is not None and top.strategy is strategy else None


@contextlib.contextmanager
def replica_context(
    strategy: AnyStrategy, context: ReplicaContext, view: StrategyView | None = None
) -> Iterator[None]:
    """Enters replica context while a replica function is traced or run; ``view`` is that of the replica."""
    _push(strategy, context, view=view)
    try:
        yield
    finally:
        _local.frames.pop()


def call_replica(
    strategy: AnyStrategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a replica function of a strategy with one replica, whose collectives return their operands."""
    with replica_context(strategy, ReplicaContext(strategy, None, OneReplica())):
        return unwrap(fn)(*args, **kwargs)


@contextlib.contextmanager
def merge_context(
    strategy: AnyStrategy, communicator: Communicator | None, is_update: bool = False
) -> Iterator[None]:
    """Enters cross-replica context inside ``merge_call`` and ``extended.update``."""
    _push(strategy, None, communicator, is_update=is_update)
    try:
        yield
    finally:
        _local.frames.pop()


class LocalPerReplica(DistributedValues):
    """A per-replica value in ``merge_call``. The traced program sees its own component.

    Attributes:
      local: This replica's component.
    """

    __slots__ = ("_communicator", "local")

    def __init__(self, local: Any, communicator: Communicator):
        self.local = local
        self._communicator = communicator

    @property
    def communicator(self) -> Communicator:
        return self._communicator

    @property
    def dtype(self) -> Any:
        return self.local.dtype

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(self._communicator.components(self.local))

    def as_array(self) -> Any:
        return PerReplica(self.local, self._communicator.num_replicas).as_array()

    def __repr__(self) -> str:
        return f"PerReplica(in merge_call, this replica's: {self.local})"


def local_components(pytree: Any, communicator: Communicator) -> Any:
    """Converts ``PerReplica`` values for the program that is traced in ``merge_call``.

    Raises:
      UnsupportedError: The components have different shapes, but the program has one shape for all replicas.
    """

    def own(value: PerReplica) -> LocalPerReplica:
        if value.shapes is not None:
            raise UnsupportedError(
                f"In merge_call all components of a per-replica value must have one shape, got {list(value.shapes)}. Make "
                "the value outside of strategy.run, and pass it: strategy.run(fn, args=(value,))."
            )
        return LocalPerReplica(value.stored[communicator.replica_id()], communicator)

    return jax.tree_util.tree_map(own, pytree, is_leaf=is_value)


@final
class ReplicaContext:
    """The context of a replica function: its replica's index, and collectives with the other replicas.

    Get it with ``rx.get_replica_context()``.

    Args:
      strategy: The strategy whose replica this is.
      replica_id_in_sync_group: The index of the replica, from 0.
    """

    def __init__(
        self, strategy: AnyStrategy, replica_id_in_sync_group: Any, communicator: Communicator | None = None
    ):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._communicator = communicator

    @property
    def strategy(self) -> Any:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas R, a Python int."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica, from 0: a traced scalar int32 inside ``run``, 0 outside."""
        if self._communicator is None:
            return self._replica_id
        if not any(frame.replica_context is self for frame in _local.frames):
            raise self._not_here("replica_id_in_sync_group")
        return self._communicator.replica_id()

    @property
    def devices(self) -> tuple[Any, ...]:
        """The ``extended.worker_devices`` of the strategy: one per replica, because one trace serves all replicas."""
        return tuple(self._strategy.extended.worker_devices)

    @property
    def communicator(self) -> Communicator | None:
        """The communicator with the other replicas; None for the default context."""
        return self._communicator

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Combines one value per replica into one that every replica gets.

        With R replicas and x_r the array of replica r: SUM = x_0 + ... + x_{R-1}, MEAN = SUM / R; the mean of
        integers has the default floating dtype. Call it from every replica, in the same order. It
        communicates; it does not block Python. Differentiable: the gradient of an all-reduce is the all-reduce
        of the gradients.

        Args:
          reduce_op: ``ReduceOp.SUM`` or ``MEAN``, or their names.
          value: An array [...] per replica, a pytree of such, or ``IndexedSlices``. Shapes are the same on all
            replicas.
          options: The options of the communication.

        Returns:
          The reduced value in the same structure, equal on all replicas.

        Raises:
          InvalidArgumentError: ``reduce_op`` is unknown.
          ReductionError: A leaf is not numeric.
          ReplicaContextError: The call is outside of the replica function of this context.

        Source: tf.distribute.ReplicaContext.all_reduce.
        """
        op = ReduceOp.parse(reduce_op)
        self._check_here("all_reduce")
        if self._communicator is None:
            return value
        return self._strategy.reduce_in_replica(self._communicator, op, value, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenates the replicas' values along ``axis``, in replica order, on every replica.

        Call it from every replica. It communicates. Differentiable.

        Args:
          value: [...] per replica, or a pytree of such; sizes may differ along ``axis`` only.
          axis: A dim of the values.

        Raises:
          ReductionError: The values are scalars, the axis is invalid, or other dims differ.
          UnsupportedError: A leaf is ``IndexedSlices``.

        Source: tf.distribute.ReplicaContext.all_gather.
        """
        del options  # there is nothing to choose
        self._check_here("all_gather")
        if self._communicator is None:
            return value
        return in_replica.all_gather(self._communicator, value, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``merge_fn(strategy, *args, **kwargs)`` once, in cross-replica context, for all replicas.

        Arrays in ``args`` arrive as per-replica values, Python values unchanged. Each replica gets its own component of
        per-replica values that ``merge_fn`` returns, and everything else unchanged.
        Call it from every replica. It works in conditions and nested functions wherever a collective does.

        Source: tf.distribute.ReplicaContext.merge_call.
        """
        self._check_here("merge_call")
        communicator = self._communicator
        wrapped, kw = tuple(args), dict(kwargs or {})
        if communicator is not None and communicator.num_replicas > 1:
            wrapped, kw = jax.tree_util.tree_map(
                lambda leaf: _as_cross_replica(leaf, communicator), (wrapped, kw), is_leaf=is_value
            )
        with merge_context(self._strategy, communicator):
            result = merge_fn(self._strategy, *wrapped, **kw)
        return jax.tree_util.tree_map(_as_local, result, is_leaf=is_value)

    def _check_here(self, what: str) -> None:
        """Raises unless the caller is in the replica function of this context."""
        if self._communicator is not None and get_replica_context() is not self:
            raise self._not_here(what)

    def _not_here(self, what: str) -> ReplicaContextError:
        return ReplicaContextError(
            f"`{what}` of a ReplicaContext of {self._strategy!r} was called outside of its replica function: in "
            f"merge_call, in another function, or after it ended. Call rx.get_replica_context() again in each "
            f"function that strategy.run runs; in merge_call use strategy.reduce and strategy.gather."
        )

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy!r})"


def _as_cross_replica(leaf: Any, communicator: Communicator) -> Any:
    return LocalPerReplica(leaf, communicator) if isinstance(leaf, jax.Array) else leaf


def _as_local(leaf: Any) -> Any:
    if isinstance(leaf, LocalPerReplica):
        return leaf.local
    return leaf.as_array() if isinstance(leaf, Mirrored) else leaf


# Strategies of variables and models that have no attribute for it (Keras's), by id. An entry is removed with its
# object.
_owners: dict[int, Any] = {}


def owner_of(made: Any) -> Any:
    """Returns the strategy in whose scope a variable or model was made; None if it was in none."""
    owner = _owners.get(id(made))
    if owner is None and getattr(type(made), "distribute_strategy", None) is not None:
        owner = made.distribute_strategy
    return owner


def num_owned() -> int:
    """Returns the number of variables and models of other libraries that were made in scopes and are alive."""
    return len(_owners)


def remember_owner(made: Any) -> None:
    """Records the strategy in whose scope a variable or model of another library is made, if there is one."""
    if has_strategy():
        _owners[id(made)] = strategy_for_new_variable()
        weakref.finalize(made, _owners.pop, id(made), None)


def default_has_no(what: str) -> ContextError:
    """Returns the error for asking the default strategy about devices."""
    return ContextError(
        f"`{what}` is not known for the default strategy, which places nothing. Use rx.OneDeviceStrategy or "
        f"rx.MirroredStrategy, or jax.local_devices()."
    )
