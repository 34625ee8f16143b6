"""Arguments of scheduled functions: tensors of other libraries, and arrays that a function closes over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checks import message
from foreign_tensors import REFUSED, OnlyDlpack, OutOfReach, Recorded, Tensor, Wide
from in_memory_servers import in_memory_strategy
from replicax._src.values import narrowing
from replicax.coordinator import ClusterCoordinator
from replicax.errors import InvalidArgumentError, NarrowingError


@pytest.fixture(scope="module")
def call():
    with in_memory_strategy(workers=1, ps=1) as strategy, ClusterCoordinator(strategy) as coordinator:
        yield lambda fn, *args: coordinator.schedule(fn, args=args).fetch(60)


@pytest.mark.parametrize("kind", [Tensor, OnlyDlpack, OutOfReach])
def test_a_tensor_is_an_input(call, kind):
    def total(batch):
        assert isinstance(batch["x"], jax.core.Tracer)
        return jnp.sum(batch["x"])

    assert [float(call(total, {"x": kind(np.full(3, i, np.float32))})) for i in range(3)] == [0, 3, 6]


@pytest.mark.parametrize("kind", [Tensor, Wide])
def test_64_bits_of_a_tensor_are_checked(call, kind):
    ids = kind(np.array([1, 2**40]))
    message(NarrowingError, lambda: call(lambda ids: jnp.sum(ids * 1.0), ids), "1099511627776")


@pytest.mark.parametrize("name", REFUSED)
def test_non_arrays_raise_and_say_what_to_write(call, name):
    kind, says = REFUSED[name]
    message(InvalidArgumentError, lambda: call(lambda x: 1.0, kind(np.ones(2))), "args[0]", says)


def test_tensor_whose_gradient_is_recorded_raises(call):
    recorded = Recorded(np.ones(2))
    message(InvalidArgumentError, lambda: call(lambda x: 1.0, recorded), "requires grad", "detach()")


def adding_the_first_of(array):
    return lambda x: x + array[0]


def test_array_used_only_for_its_shape_may_hold_any_number(call):
    ids = np.array([1, 2**40])
    assert float(call(lambda x: x + len(ids) + jnp.sum(jnp.ones_like(ids)), jnp.float32(1))) == 5


@pytest.mark.parametrize("wrong", [2**40, 1e300], ids=["int", "float"])
def test_changed_closure_is_checked_even_if_the_program_exists(call, wrong):
    call(adding_the_first_of(np.array([1, 2])), jnp.float32(1))
    for _ in range(2):
        array = np.array([type(wrong)(1), wrong])
        message(
            NarrowingError, lambda a=array: call(adding_the_first_of(a), jnp.float32(1)), "closure['array']"
        )


def test_closed_over_array_is_checked_once(call, monkeypatch):
    looked = []
    monkeypatch.setattr(narrowing, "_narrowed", lambda array, *rest: looked.append(array))
    steps = [adding_the_first_of(np.array([i, 2])) for i in (1, 3)]
    for _ in range(3):
        assert [float(call(step, jnp.float32(1))) for step in steps] == [2, 4]
    assert len(looked) == len(steps)
