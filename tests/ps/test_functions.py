"""Functions that a coordinator schedules, or runs here: results, methods, and decorated ``rx.function``."""

import functools

import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax._src.cluster.spec import ClusterSpec
from servers import servers


def yielding(x):
    yield x


async def waiting(x):
    return x


@pytest.mark.filterwarnings("ignore:Python iterable type 'generator' is treated as a leaf:DeprecationWarning")
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (yielding, ("a generator (yield), yielding", "its body has not been run")),
        (waiting, ("a coroutine (async def), waiting", "its body has not been run")),
        (lambda x: {"name": np.array(["a"])}, ("ndarray of dtype <U1", "Return a str or a list")),
        (lambda x: np.datetime64("2026-01-01"), ("datetime64 of dtype datetime64[D]",)),
    ],
    ids=["generator", "coroutine", "text", "date"],
)
def test_unsupported_results_raise(fn, says):
    message(errors.UnsupportedError, lambda: servers(1).closures.prepare(fn, (np.float32(1),)), *says)


class Doubling:
    def __init__(self, scale):
        self.scale = scale

    @rx.function
    def step(self, x):
        return x * self.scale

    @classmethod
    @rx.function
    def of_class(cls, x):
        return cls(2.0).step(x)


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args) + 100.0

    return wrapper


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (Doubling(2.0).step, 6.0),
        (Doubling.of_class, 6.0),
        (logged(rx.function(lambda x: x * 2.0)), 106.0),
    ],
    ids=["method", "classmethod", "decorated"],
)
def test_a_method_and_its_surrounding_code_run_on_servers(fn, expected):
    on_servers = servers(1)
    closure = on_servers.closures.prepare(fn, (np.float32(3.0),))
    assert float(on_servers.run_here(fn, np.float32(3.0))) == expected
    assert closure.name.split(".")[-1] in ("step", "of_class", "<lambda>")


def test_servers_support_neither_eager_runs_nor_checked_ones_nor_several_steps():
    strategy = servers(1)
    for option, says in (
        ("eager", "travel as compiled programs"),
        ("check_finite", "OneDevice"),
        ("check_same", "Mirrored"),
    ):
        options = rx.RunOptions(**{option: True})
        message(
            errors.UnsupportedError,
            lambda o=options: strategy.run(lambda: 1.0, options=o),
            f"{option}=True",
            says,
        )
    message(
        errors.UnsupportedError,
        lambda: strategy.run_steps(lambda x: x, iter([]), 1),
        "Several steps",
        "schedule",
    )
    message(errors.UnsupportedError, lambda: strategy.lower(lambda: 1.0), "does not keep its variables")


def test_a_server_takes_a_cluster_def():
    definition = ClusterSpec({"ps": ["localhost:7"]}).as_cluster_def()
    server = rx.Server(definition, start=False)
    assert server.server_def.cluster == ClusterSpec({"ps": ["localhost:7"]})


@pytest.mark.parametrize("make", [rx.coordinator.PerWorkerValue, rx.experimental.coordinator.PerWorkerValues])
def test_values_of_workers_are_made_by_the_coordinator(make):
    for call in (make, lambda: make([1, 2]), lambda: make(values=[1, 2])):
        message(errors.UnsupportedError, call, "PerWorkerValue", "coordinator.create_per_worker_value(fn)")
