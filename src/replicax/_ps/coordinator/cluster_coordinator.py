"""``ClusterCoordinator``: runs functions on whichever worker is free, while the program continues."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import jax

from replicax._ps.client.session import Session
from replicax._ps.coordinator.coordinator_options import CoordinatorOptions
from replicax._ps.coordinator.job_loop import JobLoop, begin_job
from replicax._ps.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from replicax._ps.coordinator.remote_value import RemoteValue, check_not_traced, fetched
from replicax._ps.coordinator.resource_recipe import per_worker_dataset, per_worker_values
from replicax._ps.coordinator.scheduled_work import SendableFunction, Work
from replicax._ps.coordinator.statistics import status_of
from replicax._ps.job.limits import Limits
from replicax._ps.job.setup import OnPsRestart
from replicax._ps.strategy.remote_closures import Closures
from replicax._ps.strategy.strategy_form import StrategyForm
from replicax._src.program_kit.captures import name_of
from replicax._src.program_kit.errors import ClosureInputError, InvalidArgumentError
from replicax._src.program_kit.own_process import join_before_saves

if TYPE_CHECKING:
    from replicax._ps.strategy.parameter_server import ParameterServerStrategy

log = logging.getLogger("replicax")

_EXIT_S = 5.0

_loops_at_work: set[JobLoop] = set()
_loops: weakref.WeakKeyDictionary[Any, JobLoop] = weakref.WeakKeyDictionary()
"""The latest loop of each strategy."""

_coordinators: weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]] = weakref.WeakKeyDictionary()
_construction = threading.Lock()


@runtime_checkable
class ClosureStrategy(Protocol):
    """A strategy whose workers wait for functions: a ``ParameterServerStrategy``, or a cluster in memory."""

    @property
    def form(self) -> StrategyForm: ...
    @property
    def session(self) -> Session: ...
    @property
    def closures(self) -> Closures: ...


@final
class ClusterCoordinator:
    """Runs functions on the workers of a ParameterServerStrategy; the variables are on the parameter servers.

    There is one coordinator for each strategy: the constructor returns the existing one. Close it, use it in
    ``with``, or drop it to end its threads.

    A scheduled function runs on some worker at some time. If its worker dies, it runs again, but each parameter
    server applies its update only once. The first function that fails cancels the queued ones. The next
    ``schedule``, ``join`` or ``done`` raises its error, and then the coordinator works again.

    Args:
      strategy: A ParameterServerStrategy.
      max_staleness: The most functions that a worker may be ahead of the slowest worker; None for no limit.
      replicas_to_aggregate: The number of functions whose gradients are averaged for one optimizer step; this
        trains synchronously, as all of them compute with the same values. Gradients that arrive after their update
        are dropped, so with more workers than this the slowest are not waited for. None applies each function's
        gradients on their own.
      reconnect_timeout_s: The seconds to try to reconnect to a lost worker, or to a lost parameter server that has
        snapshots.
      on_ps_restart: The reaction when a parameter server has restarted from its last snapshot. "continue": the
        others stay as they are; with ``replication=2``, if both servers of a variable are lost, the newer of their
        snapshots is used. "rewind": all servers go back to snapshots that they take together while the workers
        pause; not allowed with ``replication=2``.
      status_address: The ``host:port`` at which a page shows the status of all tasks, and ``replicax top`` reads
        it. None uses ``REPLICAX_STATUS_ADDRESS``, where a page that cannot be served is only a warning; without
        that there is no page.

    Raises:
      InvalidArgumentError: The strategy is not a ParameterServerStrategy or has a coordinator with other options,
        both max_staleness and replicas_to_aggregate are given, or other machines can reach ``status_address`` and
        there is no ``REPLICAX_TOKEN``.
      AddressError: The status page cannot be served at ``status_address``.
    """

    _strategy: ClosureStrategy
    _loop: JobLoop
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
                f"ClusterCoordinator needs a ParameterServerStrategy, got {type(strategy).__name__}, whose steps "
                "strategy.run runs. Make a replicax.ParameterServerStrategy(cluster_resolver)."
            )
        strategy.form.check_coordinates(
            lambda: InvalidArgumentError(
                "ClusterCoordinator needs a chief and workers that wait for functions, but here every worker runs this "
                "program: call strategy.run. Or make ParameterServerStrategy(is_coordinator=True) in a chief, and run "
                "`replicax server` on the workers."
            )
        )
        options = CoordinatorOptions(
            max_staleness, replicas_to_aggregate, reconnect_timeout_s, on_ps_restart, status_address
        )
        with _construction:
            existing = _coordinators.get(strategy, lambda: None)()
            if existing is None or existing._loop.is_closed:
                existing = super().__new__(cls)
                existing._begin(strategy, options, must_serve=bool(status_address))
                _coordinators[strategy] = weakref.ref(existing)
            elif existing._options != options:
                raise InvalidArgumentError(
                    f"The strategy already has a ClusterCoordinator, with {existing._options}, and each "
                    f"strategy has only one; got {options}. Use the same options, or close() it first."
                )
            return existing

    def _begin(self, strategy: ClosureStrategy, options: CoordinatorOptions, *, must_serve: bool) -> None:
        self._strategy, self._options = strategy, options
        self._num_averaged = options.replicas_to_aggregate
        self._has_warned = False
        limits = Limits(reconnect_s=options.reconnect_timeout_s)
        self._loop = begin_job(strategy.session, options, limits, _loops.get(strategy))
        self._status = None
        if options.status_address is not None:
            from replicax._src.program_kit.status import server_of_tasks  # few programs serve it

            loop = self._loop
            self._status = server_of_tasks(
                options.status_address,
                lambda own: status_of(loop.statistics(), own, time.time()),
                must_serve=must_serve,
            )
        _loops[strategy] = self._loop
        self._finalizer = weakref.finalize(
            self, _end, self._loop, _nothing if self._status is None else self._status.close
        )
        self._finalizer.atexit = False
        _loops_at_work.add(self._loop)
        strategy.session.before_close = self._loop.end  # otherwise ended tasks would seem lost
        self._loop.start()
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
        """Has a worker run a function. Returns at once, with a future of the result.

        The function is traced here, in the strategy's scope, at the first call and again for arguments of other
        shapes. The call blocks while the queue is full (262,144 functions). The first time that a function takes
        elements of a dataset, it blocks until a worker has made the dataset.

        Args:
          fn: A function, with or without ``rx.function``. It may call ``next`` on per-worker iterators, and
            ``strategy.run``.
          args: Its arguments: pytrees of arrays, Python values, per-worker iterators and values. RemoteValues are
            not allowed.
          kwargs: Its keyword arguments, of the same kinds.

        Raises:
          Exception: An earlier function failed with it and it has not been raised yet, or the tracing raised it.
        """
        check_not_traced("schedule")
        args, kwargs = _arguments(fn, args, kwargs)
        _check(fn, args, kwargs)
        self._loop.check()
        keeps = (fn, args, kwargs)
        prepare = functools.partial(
            self._strategy.closures.prepare, fn, args, kwargs, num_averaged=self._num_averaged
        )
        try:
            prepared = prepare()
        except ClosureInputError as error:
            value = RemoteValue(name_of(fn), None)
            self._loop.schedule(name_of(fn), value, None, error)
            return value
        session = self._strategy.session
        value = RemoteValue(prepared.name, prepared.assemble, session.renew)
        self._loop.schedule(
            prepared.name, value, Work(SendableFunction.of(prepared, session), prepare, keeps)
        )
        return value

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all scheduled functions have ended.

        Args:
          timeout_s: The longest wait in seconds; None for no limit.

        Raises:
          UnavailableError: A parameter server is lost, or all workers have been lost for too long.
          ClosureInputError: A per-worker dataset or value that a function takes could not be made.
          OutOfRangeError: A function took more elements than a dataset has.
          WaitTimeoutError: ``timeout_s`` has passed.
          Exception: The error of the first function that failed.
        """
        check_not_traced("join")
        try:
            self._loop.join(timeout_s)
        finally:
            self._strategy.session.renew()
        if self._num_averaged is not None and not self._has_warned:
            self._warn_of_waiting(self._num_averaged)

    def _warn_of_waiting(self, num_averaged: int) -> None:
        num_waiting = self._loop.num_waiting_gradients
        if num_waiting:
            self._has_warned = True
            log.warning(
                "All functions have ended, but the gradients of the last %d are not applied yet: "
                "replicas_to_aggregate is %d, so they wait for the next functions. Schedule a multiple of %d "
                "functions.",
                num_waiting,
                num_averaged,
                num_averaged,
            )

    def done(self) -> bool:
        """True if all scheduled functions have ended. Raises the errors of ``join``.

        It does not block, except after a failure, until no function is in flight.
        """
        check_not_traced("done")
        try:
            is_done = self._loop.done()
        except BaseException:
            self._strategy.session.renew()
            raise
        if is_done:
            self._strategy.session.renew()
        return is_done

    def fetch(self, val: Any) -> Any:
        """Waits for the RemoteValues in a pytree. Returns the pytree with their results as NumPy arrays; other leaves
        stay.
        """
        return fetched(val)

    # --- per-worker objects ----------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Has each worker make a dataset of its own. Each worker reads all of its dataset, not a part.

        Pass ``iter`` of the result to scheduled functions, which call ``next`` on it. A worker that reconnects
        after a failure starts its dataset from the beginning. ``cloudpickle`` sends the function to the workers,
        which need the packages that it imports.

        Args:
          dataset_fn: A function that returns a dataset and takes no argument or an ``rx.InputContext``; or a
            dataset, also one that the strategy has distributed.

        Raises:
          InvalidArgumentError: ``dataset_fn`` cannot be pickled.
        """
        return per_worker_dataset(self._loop, dataset_fn)

    def create_per_worker_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Has each worker make a value of its own. In scheduled functions the result stands for the worker's value.

        Args:
          fn: A function without arguments. It runs on the workers, like that of ``create_per_worker_dataset``.
        """
        return per_worker_values(self._loop, fn)

    # --- copies ----------------------------------------------------------------------------------------

    def check_copies(self) -> list[str]:
        """Compares both copies of all variables bit for bit, at one moment, if the strategy has ``replication=2``.

        Updates wait meanwhile, 0.3 s per GB. A second copy that differs is dropped and copied again, with an error
        in the log.

        Returns:
          The parameter servers whose variables did not have two equal copies, such as ``["ps 0"]``; empty if all
          did.
        """
        return [f"ps {ps}" for ps in self._strategy.session.compare_copies()]

    # --- end -------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Returns the numbers of functions by state, and the state of each task."""
        return self._loop.statistics()

    @property
    def status_url(self) -> str | None:
        """The URL of the status page, with a token in it if one is needed; None if there is no page."""
        return None if self._status is None else self._status.url

    def close(self) -> None:
        """Cancels all functions that have not ended, and ends the threads.

        The variables stay, and so does the session with the servers.
        """
        if self._status is not None:
            self._status.close()
        self._loop.end()
        self._finalizer.detach()
        _loops_at_work.discard(self._loop)

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def coordinator_of(strategy: ParameterServerStrategy) -> ClusterCoordinator:
    """Returns the coordinator of a strategy, whatever its options. If there is none, makes one that the strategy
    keeps.
    """
    existing = _coordinators.get(strategy, lambda: None)()
    if existing is None or existing._loop.is_closed:
        existing = strategy.own_coordinator = ClusterCoordinator(strategy)
    return existing


def _join_coordinators() -> None:
    """Waits for the functions of all coordinators of this process that have not been closed."""
    for reference in list(_coordinators.values()):
        coordinator = reference()
        if coordinator is not None and not coordinator._loop.is_closed:
            coordinator.join()


def _nothing() -> None:
    """Closes a status that is not served."""


def _end(loop: JobLoop, close_status: Callable[[], object]) -> None:
    def end() -> None:
        close_status()
        loop.end()
        _loops_at_work.discard(loop)

    # Garbage collection may run while a lock is held that this needs, so another thread does it.
    with contextlib.suppress(RuntimeError):  # no thread can start while Python shuts down
        threading.Thread(target=end, name="replicax-coordinator-end", daemon=True).start()


def _end_with_python() -> None:
    """Ends all jobs at exit: a thread that still waits for a task during Python's shutdown would crash the process."""
    loops = list(_loops_at_work)
    for loop in loops:
        loop.close()
    for loop in loops:
        loop.join_threads(_EXIT_S)


atexit.register(_end_with_python)
join_before_saves(_join_coordinators)


def _arguments(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args is not None and not isinstance(args, list | tuple):
        raise InvalidArgumentError(
            f"schedule() of '{name_of(fn)}': args must be a list or tuple of the positional arguments, got "
            f"{type(args).__name__}. For one argument write args=(x,)."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
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
                f"The arguments of '{name_of(fn)}' contain a per-worker dataset. Pass an iterator of it, "
                "iter(dataset), which continues from one function to the next."
            )
        if isinstance(leaf, RemoteValue):
            # TensorFlow's message begins like this.
            raise InvalidArgumentError(
                "`replicax.coordinator.RemoteValue` used as an input to scheduled function is not yet supported. "
                f"The arguments of '{name_of(fn)}' contain {leaf!r}: pass the result of its fetch()."
            )
