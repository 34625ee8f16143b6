"""Calls that a coordinator and its strategy reject, and their reprs."""

import numpy as np
import pytest

import replicax as rx
from checks import message
from in_memory_servers import in_memory_strategy
from replicax.coordinator import ClusterCoordinator
from replicax.errors import (
    ClosureInputError,
    ContextError,
    InvalidArgumentError,
    NarrowingError,
    TraceError,
    UnsupportedError,
)


@pytest.fixture(scope="module")
def strategy():
    with in_memory_strategy(workers=2, ps=2) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def coordinator(strategy):
    with ClusterCoordinator(strategy) as coordinator:
        yield coordinator


@pytest.mark.parametrize("args", [3, np.ones(2), "ab", {"x": 1}], ids=["number", "array", "text", "dict"])
def test_arguments_are_a_list_or_tuple(coordinator, args):
    kind = type(args).__name__
    message(
        InvalidArgumentError, lambda: coordinator.schedule(abs, args=args), "list or tuple", kind, "args=(x,)"
    )


def test_arguments_by_name_are_a_dict(coordinator):
    message(
        InvalidArgumentError, lambda: coordinator.schedule(abs, kwargs=[1]), "kwargs must be a dict", "list"
    )


def test_ids_that_jax_would_truncate_raise(coordinator):
    ids = np.array([2**32 + 1])
    message(
        NarrowingError, lambda: coordinator.schedule(lambda ids: ids, args=(ids,)), "args[0] has 4294967297"
    )
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [{"ids": ids}]))
    coordinator.schedule(lambda i: next(i), args=(iterator,))
    message(ClosureInputError, coordinator.join, "batch['ids'] has 4294967297")


def test_modules_raise_after_a_call_with_arrays_too(coordinator):
    nnx = pytest.importorskip("flax.nnx")
    step = lambda model: model  # noqa: E731
    coordinator.schedule(step, args=(np.ones(2, np.float32),)).fetch()
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for _ in range(2):
        message(UnsupportedError, lambda: coordinator.schedule(step, args=(module,)), "nnx.split")


def test_blocking_calls_raise_in_a_traced_function(coordinator):
    """The call would happen once; and its wait may need a program, which waits for the current trace."""
    value = coordinator.schedule(lambda: np.float32(1))
    for name, call in {
        "schedule": lambda: coordinator.schedule(lambda: 1),
        "join": lambda: coordinator.join(),
        "done": lambda: coordinator.done(),
        "fetch": lambda: coordinator.fetch([value]),
    }.items():
        message(
            ContextError, lambda call=call: coordinator.schedule(call), f"{name}() was called at", __file__
        )
    assert value.fetch() == 1
    coordinator.join()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_staleness": -1}, "got -1"),
        ({"max_staleness": 1.5}, "got 1.5"),
        ({"reconnect_timeout_s": -1}, "got -1"),
        ({"reconnect_timeout_s": "an hour"}, "got 'an hour'"),
        ({"status_address": 8080}, "got 8080"),
    ],
    ids=lambda value: str(value),
)
def test_options_are_checked(options, says):
    with in_memory_strategy() as strategy:
        (name,) = options
        message(InvalidArgumentError, lambda: ClusterCoordinator(strategy, **options), name, says)


@pytest.mark.parametrize("make", [rx.ParameterServerStrategy, rx.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("given", ["localhost:1", {"ps": ["a:1"], "worker": ["b:1"]}], ids=["text", "dict"])
def test_invalid_resolvers(make, given):
    says = (f"got {type(given).__name__}", "SimpleClusterResolver(ClusterSpec(")
    message(InvalidArgumentError, lambda: make(given), "cluster_resolver", *says)


def test_reprs(strategy, coordinator):
    assert repr(strategy) == "<ParameterServerStrategy of 2 workers and 2 parameter servers>"
    assert repr(coordinator) == f"<ClusterCoordinator of {strategy!r}>"
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(1)]))
    assert repr(iterator).startswith("<PerWorkerIterator of 'dataset ")
    assert repr(coordinator.create_per_worker_value(int)).startswith("<PerWorkerValues: 'value ")


def test_iterator_of_a_closed_coordinator_works_with_no_other():
    def take(iterator):
        return next(iterator)

    with in_memory_strategy() as strategy:
        with ClusterCoordinator(strategy) as first:
            old = iter(first.create_per_worker_dataset(lambda: [np.float32(1)] * 9))
            assert first.schedule(take, args=(old,)).fetch() == 1
        with ClusterCoordinator(strategy) as second:
            new = iter(second.create_per_worker_dataset(lambda: [np.float32(2)] * 9))
            assert second.schedule(take, args=(new,)).fetch() == 2
            value = second.schedule(take, args=(old,))
            message(ClosureInputError, lambda: value.fetch(60), "ClusterCoordinator that was closed")
            message(ClosureInputError, second.join, "Make a new one")
            assert second.schedule(take, args=(new,)).fetch() == 2


def test_a_function_knows_which_worker_runs_it(coordinator, strategy):
    """This also holds for the next coordinator's workers, with a program that was made before."""

    def index_of(x):
        index = rx.coordinator.experimental_get_current_worker_index()
        return index, strategy.run(
            lambda x: x + rx.coordinator.experimental_get_current_worker_index(), args=(x,)
        )

    value = coordinator.create_per_worker_value(
        lambda: rx.coordinator.experimental_get_current_worker_index()
    )
    for _ in range(10):
        (index, more), expected = coordinator.schedule(lambda v: (index_of(10), v), args=(value,)).fetch()
        assert index == expected
        assert index.dtype == np.int32
        assert more == 10 + expected
    with in_memory_strategy() as other:
        for _ in range(2):
            with ClusterCoordinator(other) as each:
                known = each.schedule(rx.coordinator.experimental_get_current_worker_index).fetch(60)
                assert known == 0
    message(
        ContextError,
        rx.coordinator.experimental_get_current_worker_index,
        "outside of a function",
        "scheduled",
    )


def test_elements_of_a_function_are_decided_before_it_runs(coordinator):
    """Each trace of a branch once took an element, whether the branch was taken or not, and a loop never ended."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.float32(n) for n in range(9)]))

    def take(iterator, is_taken):
        return rx.cond(is_taken, lambda: next(iterator), lambda: np.float32(0))

    def take_all(iterator):
        return sum(iterator)

    says = ("inside a branch of rx.cond", __file__, "Call it outside")
    message(TraceError, lambda: coordinator.schedule(take, args=(iterator, np.bool_(True))), *says)
    says = ("more than 1024 elements", __file__, "for _ in range(n)")
    message(TraceError, lambda: coordinator.schedule(take_all, args=(iterator,)), *says)
    pairs = coordinator.schedule(lambda iterator: [x for _, x in zip(range(2), iterator)], args=(iterator,))
    assert len(pairs.fetch(60)) == 2
    coordinator.join()


def test_per_worker_values_are_not_in_this_process(strategy, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(1)]))
    for call in (
        lambda: next(iterator),
        rx.coordinator.experimental_get_current_worker_index,
    ):
        message(ContextError, lambda call=call: strategy.run(call), "a worker's own input", "schedule")
