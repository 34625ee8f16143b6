"""``ClusterCoordinator``: runs functions on whichever worker is free, while the program continues."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import jax

from replicax._src.cluster.credentials import Credentials
from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.coordinator.closures import ClosureQueue
from replicax._src.parameter_servers.coordinator.coordinator_options import CoordinatorOptions
from replicax._src.parameter_servers.coordinator.limits import Limits
from replicax._src.parameter_servers.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from replicax._src.parameter_servers.coordinator.pool import WorkerPool
from replicax._src.parameter_servers.coordinator.prepared import ClosureStrategy
from replicax._src.parameter_servers.coordinator.ps_recovery import OnPsRestart
from replicax._src.parameter_servers.coordinator.remote_value import RemoteValue, check_not_traced, fetched
from replicax._src.parameter_servers.coordinator.resource_recipe import per_worker_dataset, per_worker_values
from replicax._src.parameter_servers.coordinator.scheduled_work import Work
from replicax._src.parameter_servers.coordinator.status import status_of
from replicax._src.parameter_servers.errors import ClosureInputError
from replicax._src.parameter_servers.task.process import vitals
from replicax._src.tracing.key import name_of

if TYPE_CHECKING:
    from replicax._src.parameter_servers.coordinator.status_server import StatusServer
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy

log = logging.getLogger("replicax")

_EXIT_S = 5.0

_pools_at_work: set[WorkerPool] = set()
_pools: weakref.WeakKeyDictionary[Any, WorkerPool] = (
    weakref.WeakKeyDictionary()
)  # the last one of each strategy
_coordinators: weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]] = weakref.WeakKeyDictionary()
_construction = threading.Lock()


@final
class ClusterCoordinator:
    """Runs functions on the workers of a ParameterServerStrategy; the variables are on the parameter servers.

    There is one coordinator for each strategy: the constructor returns the one that is there already. Close it, use it
    in ``with``, or drop it: its threads end then.

    A function that was scheduled runs on some worker, at some time, once as far as variables are concerned: one whose
    worker died is run again, and each parameter server applies what it sends once. The first function that fails
    cancels those in the queue, and its error is raised by the next ``schedule``, ``join`` or ``done``; then all goes
    on.

    Args:
      strategy: A ParameterServerStrategy.
      max_staleness: How many functions a worker may have begun more than the slowest one has ended, that one apart;
        None for no limit.
      replicas_to_aggregate: Train synchronously: an optimizer updates variables with the mean of the gradients of so
        many functions, which all computed with the same values, and counts that as one step. Gradients that come when
        their update is done are dropped: with more workers than this the slowest are not waited for. None: each
        function's gradients are an update.
      reconnect_timeout_s: For how long a worker that was lost is tried to be reached again, and a parameter server that
        has snapshots.
      on_ps_restart: What to do when a parameter server was started again and has gone back to its last snapshot.
        "continue": the others stay as they are; with ``replication=2``, if both servers of a variable are gone, the
        newer of their snapshots is used. "rewind": all go back, to snapshots that they take together, for which the
        workers pause; not with ``replication=2``.
      status_address: ``host:port`` where a page shows how all tasks are, and ``replicax top`` finds it; None for what
        ``REPLICAX_STATUS_ADDRESS`` says, which is nowhere if it is not set.

    Raises:
      InvalidArgumentError: Of another strategy; or both max_staleness and replicas_to_aggregate; or the strategy has a
        coordinator with other options; or other machines
        reach the status address, and there is no ``REPLICAX_TOKEN``.
      UnavailableError: The status cannot be served at its address.
    """

    _strategy: ClosureStrategy
    _pool: WorkerPool
    _options: CoordinatorOptions

    def __new__(
        cls,
        strategy: ParameterServerStrategy,
        *,
        max_staleness: int | None = None,
        replicas_to_aggregate: int | None = None,
        reconnect_timeout_s: float = 3600.0,
        on_ps_restart: OnPsRestart = "continue",
        status_address: str | None = None,
    ) -> ClusterCoordinator:
        if not isinstance(strategy, ClosureStrategy):
            raise InvalidArgumentError(
                f"ClusterCoordinator works with a ParameterServerStrategy, got {type(strategy).__name__}, whose steps are run "
                "by strategy.run. Make a replicax.ParameterServerStrategy(cluster_resolver)."
            )
        if not strategy.session.num_workers:
            raise InvalidArgumentError(
                "ClusterCoordinator: every worker runs this program by itself, and none waits for functions: call strategy.run. "
                "In a chief make ParameterServerStrategy(is_coordinator=True), and let the workers run `replicax server`."
            )
        options = CoordinatorOptions(
            max_staleness, replicas_to_aggregate, reconnect_timeout_s, on_ps_restart, status_address
        )
        with _construction:
            existing = _coordinators.get(strategy, lambda: None)()
            if existing is None or existing._pool.is_closed:
                existing = super().__new__(cls)
                existing._begin(strategy, options)
                _coordinators[strategy] = weakref.ref(existing)
            elif existing._options != options:
                raise InvalidArgumentError(
                    f"The strategy has a ClusterCoordinator already, with {existing._options}, and there is one for each "
                    f"strategy; got {options}. Use the same options, or close() it first."
                )
            return existing

    def _begin(self, strategy: ClosureStrategy, options: CoordinatorOptions) -> None:
        self._strategy, self._options = strategy, options
        # A server knows the numbers that it has applied for as long as the strategy's session lasts.
        before = _pools.get(strategy)
        first = 0 if before is None else before.next_number
        first_round = 0 if before is None else before.next_round_number
        self._num_averaged = options.replicas_to_aggregate
        self._has_warned = False
        queue = ClosureQueue(
            max_staleness=options.max_staleness,
            first_number=first,
            replicas_to_aggregate=self._num_averaged,
            first_round=first_round,
        )
        limits = Limits(reconnect_s=options.reconnect_timeout_s)
        self._pool = WorkerPool(queue, strategy.session, limits, options.on_ps_restart)
        self._status = _status_server(self._pool, options.status_address)
        _pools[strategy] = self._pool
        self._finalizer = weakref.finalize(self, _end, self._pool, self._status)
        self._finalizer.atexit = False
        _pools_at_work.add(self._pool)
        strategy.session.before_close = self._pool.end  # or tasks that are left would seem lost
        self._pool.start()
        if self._status is not None:
            self._status.start()

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self._strategy!r}>"

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._strategy

    # --- functions -------------------------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Has a worker run a function; returns at once, with what will become its result.

        It is traced here, in the strategy's scope, the first time and for arguments of other shapes. It blocks while
        the queue is full (262,144 functions), and, the first time that a function takes the elements of a dataset,
        until a worker has made that.

        Args:
          fn: With or without ``rx.function``. It may call ``next`` on per-worker iterators, and ``strategy.run``.
          args: Of the function: nests of arrays, Python values, per-worker iterators and values. No RemoteValues.
          kwargs: The same.

        Raises:
          Exception: What an earlier function raised, for the first time since; or what is raised while it is traced.
        """
        check_not_traced("schedule")
        args, kwargs = _arguments(fn, args, kwargs)
        _check(fn, args, kwargs)
        pool = self._pool
        try:
            pool.check()
        except BaseException:
            self._strategy.session.renew()
            raise
        keeps = (fn, args, kwargs)
        try:
            prepared = self._strategy.closures.prepare(fn, args, kwargs, num_averaged=self._num_averaged)
        except ClosureInputError as error:
            value = RemoteValue(name_of(fn), None)
            pool.refuse(name_of(fn), Work(None, value, keeps=keeps), error)
            return value
        value = RemoteValue(prepared.name, prepared.assemble, self._strategy.session.renew)
        kind = next(iter(prepared.programs.values()), None)
        pool.schedule(prepared.name, Work(prepared, value, kind, keeps))
        return value

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all functions that were scheduled have ended.

        Args:
          timeout_s: How long to wait; None for as long as it takes.

        Raises:
          UnavailableError: A parameter server is lost, or all workers have been for too long.
          ClosureInputError: What a function takes could not be made.
          OutOfRangeError: A function took more elements than a dataset has.
          WaitTimeoutError: The time is over.
          Exception: What the first function that failed raised.
        """
        check_not_traced("join")
        try:
            self._pool.join(timeout_s)
        finally:
            self._strategy.session.renew()
        if self._num_averaged is not None and not self._has_warned:
            self._warn_of_waiting(self._num_averaged)

    def _warn_of_waiting(self, num_averaged: int) -> None:
        num_waiting = self._pool.num_waiting_gradients
        if num_waiting:
            self._has_warned = True
            log.warning(
                "All functions have ended, and the gradients of the last %d are not applied yet: replicas_to_aggregate is %d, "
                "and they wait for those of functions that are scheduled next. Schedule a multiple of %d.",
                num_waiting,
                num_averaged,
                num_averaged,
            )

    def done(self) -> bool:
        """True if all functions that were scheduled have ended. Raises what ``join`` raises."""
        check_not_traced("done")
        try:
            is_done = self._pool.done()
        except BaseException:
            self._strategy.session.renew()
            raise
        if is_done:
            self._strategy.session.renew()
        return is_done

    def fetch(self, val: Any) -> Any:
        """Waits for the RemoteValues in a nest, and returns it with their results as NumPy arrays; other leaves as they
        are.
        """
        return fetched(val)

    # --- what each worker has of its own ---------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Has each worker make a dataset of its own: all of it, not a part.

        ``iter`` of what is returned is an argument of scheduled functions, which call ``next`` on it. A worker that
        comes back after it was lost starts it again from the beginning. The function is Python that runs on the
        workers, which get it by ``cloudpickle``: they need the packages that it imports.

        Args:
          dataset_fn: A function that returns a dataset, without arguments or of an ``rx.InputContext``; or a dataset.
            It may be one that the strategy has distributed.

        Raises:
          InvalidArgumentError: It cannot be pickled.
        """
        return per_worker_dataset(self._pool, dataset_fn)

    def create_per_worker_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Has each worker make a value of its own: in scheduled functions, what is returned stands for the worker's.

        Args:
          fn: Without arguments; it runs on the workers, as that of ``create_per_worker_dataset``.
        """
        return per_worker_values(self._pool, fn)

    # --- copies ----------------------------------------------------------------------------------------

    def check_copies(self) -> list[str]:
        """Compares both copies of all variables, where the strategy has ``replication=2``: at one moment, bit for bit.

        Updates wait meanwhile, 0.3 s per GB. A second copy that differs is given up, with an error in the log, and made
        anew.

        Returns:
          Parameter servers of whose variables there were no two equal copies, ``["ps 0"]``; none if all is well.
        """
        return [f"ps {ps}" for ps in self._strategy.session.on_one_server()]

    # --- the end ---------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Returns the numbers of functions by state, and the state of each task."""
        return self._pool.statistics()

    @property
    def status_url(self) -> str | None:
        """The URL of the status page, with a token in it if one is needed; None if there is no page."""
        return None if self._status is None else self._status.url

    def close(self) -> None:
        """Cancels what has not ended, and ends the threads.

        Variables stay, and so does the session with the servers.
        """
        if self._status is not None:
            self._status.close()
        self._pool.end()
        self._finalizer.detach()
        _pools_at_work.discard(self._pool)

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def coordinator_of(strategy: ParameterServerStrategy) -> ClusterCoordinator:
    """The coordinator that a strategy has, with whatever options; without one, a new one that the strategy keeps."""
    existing = _coordinators.get(strategy, lambda: None)()
    if existing is None or existing._pool.is_closed:
        existing = strategy.own_coordinator = ClusterCoordinator(strategy)
    return existing


def coordinators_at_work() -> list[ClusterCoordinator]:
    """Those of this process that have been made and not been closed."""
    made = [reference() for reference in list(_coordinators.values())]
    return [one for one in made if one is not None and not one._pool.is_closed]


def _status_server(pool: WorkerPool, address: str | None) -> StatusServer | None:
    if address is None:
        return None
    from replicax._src.parameter_servers.coordinator.status_server import StatusServer

    token = Credentials.of_environment(os.environ).token
    return StatusServer(address, token, lambda: status_of(pool.statistics(), vitals(), time.time()))


def _end(pool: WorkerPool, status: StatusServer | None) -> None:
    def end() -> None:
        if status is not None:
            status.close()
        pool.end()
        _pools_at_work.discard(pool)

    # Garbage may be collected while a lock is held that this needs, so another thread does it.
    with contextlib.suppress(RuntimeError):  # no thread begins any more: Python ends
        threading.Thread(target=end, name="replicax-coordinator-end", daemon=True).start()


def _end_with_python() -> None:
    """Ends what is at work: a thread that waits for a task when Python is gone would end the process by a signal."""
    pools = list(_pools_at_work)
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.join_threads(_EXIT_S)


atexit.register(_end_with_python)


def _arguments(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, list | tuple | None):
        raise InvalidArgumentError(
            f"schedule() of '{name_of(fn)}': args must be a list or tuple of the positional arguments, got "
            f"{type(args).__name__}. Of one argument: args=(x,)."
        )
    if not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"schedule() of '{name_of(fn)}': kwargs must be a dict of arguments by name, got {type(kwargs).__name__}."
        )
    return tuple(args or ()), dict(kwargs or {})


def _check(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not callable(fn):
        raise InvalidArgumentError(f"schedule() takes a function and its arguments, got {fn!r} as function.")
    if not args and not kwargs:
        return
    for leaf in jax.tree.leaves(
        (args, kwargs), is_leaf=lambda x: isinstance(x, RemoteValue | PerWorkerDataset)
    ):
        if isinstance(leaf, PerWorkerDataset):
            raise InvalidArgumentError(
                f"A per-worker dataset stands in the arguments of '{name_of(fn)}'. Pass an iterator of it, iter(dataset), which "
                "goes on from one function to the next."
            )
        if isinstance(leaf, RemoteValue):
            # The beginning is TensorFlow's.
            raise InvalidArgumentError(
                "`replicax.coordinator.RemoteValue` used as an input to scheduled function is not yet supported. "
                f"{leaf!r} stands in the arguments of '{name_of(fn)}': pass what its fetch() returns."
            )
