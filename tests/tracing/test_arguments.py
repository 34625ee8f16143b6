"""Tensors of other libraries as arguments: stand-ins here, the real ones in tests/peers."""

import functools

import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from foreign_tensors import REFUSED, OnlyDlpack, OutOfReach, Recorded, Tensor, Wide
from replicax._src.tracing.arguments import _may_be_foreign
from replicax._src.values import narrowing
from replicax.errors import InvalidArgumentError, NarrowingError


def in_run(strategy, options=None):
    def call(fn, *args):
        result = strategy.run(fn, args=args, options=options)
        return strategy.experimental_local_results(result)[0]

    return call


def in_function(wrapped):
    return lambda fn, *args: wrapped(fn)(*args)


CALLS = {
    "run_mirrored": lambda: in_run(rx.MirroredStrategy(["cpu:0", "cpu:1"])),
    "run_one_device": lambda: in_run(rx.OneDeviceStrategy("cpu:0")),
    "run_default": lambda: in_run(rx.get_strategy()),
    "function": lambda: in_function(functools.cache(rx.function)),
    "value_and_grad": lambda: lambda fn, *args: rx.value_and_grad(fn)(*args)[0],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]()


@pytest.fixture(params=[Tensor, OnlyDlpack, OutOfReach])
def kind(request):
    return request.param


def test_a_tensor_is_an_input(call, kind):
    def total(batch):
        assert isinstance(batch["x"], jax.core.Tracer)
        return jnp.sum(batch["x"])

    assert [float(call(total, {"x": kind(np.full(3, i, np.float32))})) for i in range(3)] == [0, 3, 6]


def test_new_tensors_make_no_new_program(kind):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    traced = []

    def total(x, y):
        traced.append("run")
        return jnp.sum(x) + y

    @rx.function
    def step(x):
        traced.append("function")
        return jnp.sum(x)

    for number in range(3):
        x = kind(np.full(3, number, np.float32))
        strategy.run(total, args=(x,), kwargs={"y": x})
        step(x)
    assert sorted(traced) == ["function", "run"]


def test_a_tensor_is_an_array_in_eager_mode(kind):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    x = kind(np.arange(4, dtype=np.float32))
    result = strategy.run(lambda x: x + 1, args=(x,), options=rx.RunOptions(eager=True))
    assert strategy.experimental_local_results(result)[0].tolist() == [1, 2, 3, 4]


def test_a_tensor_beside_donated_state_does_not_take_its_place():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    state = strategy.replicate(jnp.ones(3))
    options = rx.RunOptions(donate_args=(1,))
    result = strategy.run(lambda x, s: s + x, args=(Tensor(np.float32(2)), state), options=options)
    assert strategy.experimental_local_results(result)[0].tolist() == [3, 3, 3]
    message(rx.errors.DonatedError, lambda: state.array, "donate")


@pytest.mark.parametrize("kind", [Tensor, Wide])
def test_64_bits_of_a_tensor_are_checked(call, kind):
    ids = kind(np.array([1, 2**40]))
    message(NarrowingError, lambda: call(lambda ids: jnp.sum(ids * 1.0), ids), "1099511627776")


@pytest.mark.parametrize("name", REFUSED)
def test_non_arrays_raise_and_say_what_to_write(call, name):
    kind, says = REFUSED[name]
    message(InvalidArgumentError, lambda: call(lambda x: 1.0, kind(np.ones(2))), "args[0]", says)


def test_tensor_whose_gradient_is_recorded_raises(call):
    message(
        InvalidArgumentError, lambda: call(lambda x: 1.0, Recorded(np.ones(2))), "requires grad", "detach()"
    )


def test_real_h5py_dataset_raises(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("rows", data=np.ones(3))
        message(
            InvalidArgumentError,
            lambda: rx.function(lambda x: x)(rows),
            "Dataset of h5py",
            "dataset[start:stop]",
        )


# --- closures -----------------------------------------------------------------------------------------


with_closures_as_inputs = pytest.mark.parametrize(
    "call", [name for name in CALLS if name != "value_and_grad"], indirect=True
)


def adding_the_first_of(array):
    return lambda x: x + array[0]


def test_array_used_only_for_its_shape_may_hold_any_number(call):
    ids = np.array([1, 2**40])
    assert float(call(lambda x: x + len(ids) + jnp.sum(jnp.ones_like(ids)), jnp.float32(1))) == 5


@with_closures_as_inputs
@pytest.mark.parametrize("wrong", [2**40, 1e300], ids=["int", "float"])
def test_changed_closure_is_checked_even_if_the_program_exists(call, wrong):
    call(adding_the_first_of(np.array([1, 2])), jnp.float32(1))
    for _ in range(2):
        array = np.array([type(wrong)(1), wrong])
        message(
            NarrowingError, lambda a=array: call(adding_the_first_of(a), jnp.float32(1)), "closure['array']"
        )


def test_steps_check_a_closure_that_they_use():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def run(fn):
        dataset = strategy.experimental_distribute_dataset([np.ones(2, np.float32)] * 2)
        return strategy.run_steps(fn, iter(dataset), steps=2)

    ids = np.array([1, 2**40])
    run(lambda x: x + len(ids))
    run(adding_the_first_of(np.array([1, 2])))
    message(NarrowingError, lambda: run(adding_the_first_of(ids)), "closure['array']")


@with_closures_as_inputs
def test_closed_over_array_is_checked_once(call, monkeypatch):
    looked = []
    monkeypatch.setattr(narrowing, "_narrowed", lambda array, *rest: looked.append(array))
    steps = [adding_the_first_of(np.array([i, 2])) for i in (1, 3)]
    for _ in range(3):
        assert [float(call(step, jnp.float32(1))) for step in steps] == [2, 4]
    assert len(looked) == len(steps)


def test_other_objects_stay_constants():
    class Settings:
        dtype = "text"

        def __array__(self, dtype=None, copy=None):
            raise AssertionError("not an array")

    text = Tensor(np.array(["a", "b"], object))
    seen = []
    rx.function(lambda *args: seen.extend(args))(Settings(), text, 3, np.float32(1))
    assert isinstance(seen[0], Settings)
    assert seen[1] is text
    assert seen[2] == 3
    assert seen[3].dtype == np.float32


def test_variables_and_values_are_not_foreign():

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    values = [
        rx.Variable(1.0),
        keras.Variable(1.0),
        strategy.replicate(jnp.ones(2)),
        jnp.ones(2),
        jax.random.key(0),
    ]
    assert not any(_may_be_foreign(type(value)) for value in values)
