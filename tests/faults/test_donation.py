"""Donation never deletes an array that somebody holds, and never ends the process.

Each case is a function of a strategy, run in another Python process (a mistake here is a segmentation fault), on one
device, on several, and with central storage. The process prints the results, and the test compares them. If a case
ends the process, the cases after it run in a new one.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import replicax as rx

STRATEGIES = {
    "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored_2": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}
SEVERAL = ("mirrored_2", "central_storage")
CASES = {}


def case(expects, on=tuple(STRATEGIES)):
    """Registers a function of a strategy that returns ``expects`` under each of the strategies ``on``."""

    def register(fn):
        CASES[fn.__name__] = (fn, expects, on)
        return fn

    return register


@pytest.fixture(scope="module")
def outcomes(request):
    """For each tested case: its output, and how its process ended if it ended in this case."""
    names = [item.callspec.params["name"] for item in request.session.items if item.function is test_donation]
    found = {}
    while names:
        process = run_in_process(names)
        for line in process.stdout.splitlines():
            name, *printed = json.loads(line)
            found.setdefault(name, ([], None))[0].append(printed)
        if process.returncode == 0:
            break
        # The first case that did not finish has ended the process; or the last one did, at Python's exit.
        done = [name for name in names if len(found.get(name, ([],))[0]) == len(CASES[name][2])]
        guilty = names[min(len(done), len(names) - 1)]
        printed, _ = found.get(guilty, ([], None))
        found[guilty] = (printed, f"exit code {process.returncode}\n{process.stderr}")
        names = names[names.index(guilty) + 1 :]
    return found


def run_in_process(names):
    command = [sys.executable, __file__, *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("name", CASES)
def test_donation(name, outcomes):
    printed, ending = outcomes[name]
    assert ending is None, f"{printed}\n{ending}"
    _, expects, on = CASES[name]
    assert printed == [[strategy, expects] for strategy in on]


def main(*names):
    rx.config.set_local_devices(4)
    for name in names:
        fn, _, on = CASES[name]
        for label in on:
            result = fn(STRATEGIES[label]())
            numbers = jax.tree_util.tree_map(lambda x: np.asarray(x).tolist(), result)
            print(json.dumps([name, label, numbers]), flush=True)


# --- helpers of the cases -----------------------------------------------------------------------------


def variables(strategy, *values):
    with strategy.scope():
        return [rx.Variable(np.full(3, value, np.float32), name=f"v{i}") for i, value in enumerate(values)]


def keras_variables(strategy, *values):
    import keras

    with strategy.scope():
        return [keras.Variable(np.full(3, value, np.float32), name=f"v{i}") for i, value in enumerate(values)]


def add_one(strategy, variables, times=1):
    """A step that reads and writes all of them, twice so that it is also run from the cache."""

    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(3))
        return variables[0] * 1

    for _ in range(times):
        strategy.run(step)


def first(array):
    """The first element, read from every device that holds the array; all must be equal."""
    seen = {float(np.asarray(shard.data).ravel()[0]) for shard in array.addressable_shards}
    assert len(seen) == 1, seen
    return seen.pop()


def own(strategy, result):
    """The result of the first replica."""
    return np.asarray(strategy.experimental_local_results(result)[0])


@contextlib.contextmanager
def compiled_programs():
    """Yields a list that grows by the name of every function that XLA compiles."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Finished XLA compilation of "):
                names.append(record.getMessage().split()[4])

    handler, logger = Handler(), logging.getLogger("jax")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)
    logger.propagate = propagate


# --- aliases ------------------------------------------------------------------------------------------


@case(expects=[6.0, 6.0])
def assigned_from_another_variable(strategy):
    a, b = variables(strategy, 1, 2)
    add_one(strategy, [a, b], times=2)
    a.assign(b.value)
    add_one(strategy, [a, b], times=2)
    return [first(a.value), first(b.value)]


@case(expects=[6.0, 6.0])
def keras_variable_assigned_from_another(strategy):
    a, b = keras_variables(strategy, 1, 2)
    add_one(strategy, [a, b], times=2)
    a.assign(b.value)
    assert a.value is b.value, "the case needs two variables that hold one array"
    add_one(strategy, [a, b], times=2)
    return [first(a.value), first(b.value)]


@case(expects=[3.0, 4.0, 4.0])
def only_one_of_two_aliases_is_written(strategy):
    a, b = keras_variables(strategy, 1, 3)
    add_one(strategy, [b])
    a.assign(b.value)
    kept = a.value

    def step():
        a.assign_sub(jnp.ones(3))

    strategy.run(step)
    return [first(a.value), first(b.value), first(kept)]


@case(expects=[9.0, 9.0, 7.0])
def one_array_given_to_two_variables(strategy):
    array = jnp.full(3, 7.0)
    with strategy.scope():
        a, b = rx.Variable(array), rx.Variable(array)
    add_one(strategy, [a, b], times=2)
    return [first(a.value), first(b.value), float(array[0])]


@case(expects=[9.0, 9.0, 7.0])
def one_array_assigned_to_two_keras_variables(strategy):
    array = jnp.full(3, 7.0)
    a, b = keras_variables(strategy, 0, 0)
    a.assign(array)
    b.assign(array)
    add_one(strategy, [a, b], times=2)
    return [first(a.value), first(b.value), float(array[0])]


@case(expects=[9.0, 9.0, 9.0, 9.0, 7.0])
def one_array_put_on_the_devices_twice(strategy):
    # device_put gives two Array objects that share one buffer: comparing objects would not find it.
    array = jnp.full(3, 7.0)
    placed = jax.device_put(array, strategy.topology.replicated)
    a, b = variables(strategy, 0, 0)
    c, d = keras_variables(strategy, 0, 0)
    for variable in (a, b, c, d):
        variable.assign(jax.device_put(placed, strategy.topology.replicated))
    add_one(strategy, [a, b, c, d], times=2)
    return [first(a.value), first(b.value), first(c.value), first(d.value), float(array[0])]


@case(expects=[5.0, 5.0, 4.0, 6.0, 6.0])
def assigned_from_another_inside_a_program(strategy):
    a, b = variables(strategy, 1, 4)

    @rx.function
    def outer():
        strategy.run(lambda: a.assign(b))

    strategy.run(lambda: a.assign(b))
    kept = a.value
    add_one(strategy, [a, b])
    five = [first(a.value), first(b.value), first(kept)]
    outer()
    add_one(strategy, [a, b])
    return [*five, first(a.value), first(b.value)]


@case(expects=[6.0, 8.0, 5.0, 5.0])
def assigned_from_another_in_cross_replica_code(strategy):
    a, b = variables(strategy, 1, 5)

    @rx.function
    def copy():
        a.assign(b.value)
        return b.value

    returned = copy()
    add_one(strategy, [a])
    add_one(strategy, [b], times=3)
    return [first(a.value), first(b.value), first(returned), first(copy()) - 3]


# --- references that are kept -------------------------------------------------------------------------


@case(expects=[1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
def kept_values_stay_readable(strategy):
    (v,) = variables(strategy, 1)
    (k,) = keras_variables(strategy, 1)
    v0, k0 = v.value, k.value
    add_one(strategy, [v, k])
    v1, k1 = v.value, k.value
    add_one(strategy, [v, k], times=2)
    return [first(v0), first(v1), first(v.value), first(k0), first(k1), first(k.value)]


@case(expects=[[2.0, 3.0], [3.0, 4.0]])
def values_kept_in_a_list_stay_readable(strategy):
    a, b = variables(strategy, 1, 2)
    history = []
    for _ in range(2):
        add_one(strategy, [a, b])
        history.append([v.value for v in (a, b)])
    add_one(strategy, [a, b], times=2)
    return [[first(value) for value in step] for step in history]


@case(expects=[1.0, 1.0, 2.0, 2.0, 5.0])
def numpy_views_stay_as_they_were(strategy):
    (v,) = variables(strategy, 1)
    (k,) = keras_variables(strategy, 1)
    views = [np.asarray(v), np.asarray(k.value)]
    add_one(strategy, [v, k])
    views += [np.asarray(v.value), k.numpy()]
    add_one(strategy, [v, k], times=3)
    return [*(view[0] for view in views), first(v.value)]


@case(expects=[2.0, 4.0])
def a_returned_variable_is_not_the_variables_own_array(strategy):
    (v,) = variables(strategy, 1)

    def step():
        v.assign_add(jnp.ones(3))
        return v.value

    kept = strategy.run(step)
    add_one(strategy, [v], times=2)
    return [own(strategy, kept)[0], first(v.value)]


@case(expects=[[2.0, 2.0], [2.0, 2.0], 4.0], on=SEVERAL)
def local_results_of_a_variable_stay_readable(strategy):
    (v,) = variables(strategy, 1)
    add_one(strategy, [v])
    components = strategy.experimental_local_results(v)
    values = v.values
    add_one(strategy, [v], times=2)
    return [[c[0] for c in components], [c[0] for c in values], first(v.value)]


@case(expects=[[5.0, 5.0], [5.0, 6.0], 10.0, 13.0], on=SEVERAL)
def components_of_an_on_read_variable_stay_readable(strategy):
    with strategy.scope():
        v = rx.Variable(np.zeros(3, np.float32), synchronization="ON_READ", aggregation="SUM")
    v.assign(jnp.full(3, 10.0))
    assigned, total = strategy.experimental_local_results(v), v.value

    def step():
        v.assign_add(jnp.ones(3) * rx.get_replica_context().replica_id_in_sync_group)

    strategy.run(step)
    written = strategy.experimental_local_results(v)
    strategy.run(step)
    strategy.run(step)
    return [[c[0] for c in assigned], [c[0] for c in written], total[0], v.value[0]]


@case(expects=[[1.0, 2.0, 3.0], True])
def keras_weights_taken_before_a_step_stay(strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(1.0)
    model.set_weights([np.array([[1.0], [2.0], [3.0]])])
    kernel = model.layers[0].kernel
    weights, value = model.get_weights(), kernel.value
    x = strategy.replicate(jnp.ones((2, 3)))

    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(model(x))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for _ in range(3):
        strategy.run(step, (x,))
    moved = float(kernel.value[0, 0]) == 1.0 - 3 * 2 * strategy.num_replicas_in_sync
    assert np.array_equal(weights[0], np.asarray(value))
    return [np.asarray(value).ravel(), moved]


# --- arguments ----------------------------------------------------------------------------------------


@case(expects=[3.0, 6.0, 1.0, 3.0, 6.0, 1.0])
def a_variables_value_as_an_argument(strategy):
    results = []
    for v in (variables(strategy, 1)[0], keras_variables(strategy, 1)[0]):
        before = v.value

        def step(x, v=v):
            v.assign_add(2 * x)
            return v + x

        strategy.run(step, (v.value,))
        results.append(first(v.value))
        strategy.run(step, (jnp.ones(3),))
        out = strategy.run(step, (jnp.ones(3) * 0 + 0.5,))
        results += [own(strategy, out)[0] - 0.5, first(before)]
    return results


@case(expects=[1.0, 4.0])
def a_variables_value_replicated_and_donated(strategy):
    (v,) = variables(strategy, 1)
    add_one(strategy, [v])
    state = strategy.replicate(v.value)
    options = rx.RunOptions(donate_args=(0,))

    def step(state):
        v.assign_add(state / 2)
        return state / 2

    out = strategy.run(step, (state,), options=options)
    add_one(strategy, [v])
    return [own(strategy, out)[0], first(v.value)]


@case(expects=[0.0, 4.0, 3.0])
def a_replicated_array_stays_when_its_copy_is_donated(strategy):
    array = jnp.full(3, 3.0)
    placed = jax.device_put(array, strategy.topology.replicated)
    state = [strategy.replicate(array), strategy.replicate(placed), strategy.replicate(placed)]
    options = rx.RunOptions(donate_args=(0,))
    out = strategy.run(lambda s: [x + 1 for x in s], (state,), options=options)
    return [own(strategy, out[0])[0] - own(strategy, out[2])[0], own(strategy, out[1])[0], first(placed)]


@case(expects=[[3.0, 5.0], "DonatedError", "DonatedError"], on=SEVERAL)
def donated_and_also_passed_elsewhere(strategy):
    options = rx.RunOptions(donate_args=(0,))
    state = strategy.replicate(jnp.full(3, 1.0))
    one = strategy.run(lambda a, b, c: a + b + c, (state, state), {"c": state}, options=options)
    errors = [error_of(lambda: strategy.run(lambda a: a, (state,)))]
    state = strategy.replicate(jnp.full(3, 2.0))
    two = strategy.run(lambda a: a[0] + a[1] + state[0] / 2, ([state, state],), options=options)
    errors.append(error_of(lambda: state + 1))
    return [[own(strategy, one)[0], own(strategy, two)[0]], *errors]


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "no error"


@case(expects=[2.0, 3.0, 2.0])
def parts_taken_out_before_donation_stay(strategy):
    options = rx.RunOptions(donate_args=(0,))
    made = strategy.run(lambda x: (x * 2, x * 3), (jnp.ones(3),))
    if strategy.num_replicas_in_sync == 1:
        made = strategy.replicate(made)
    values = strategy.experimental_local_results(made[0])
    twin = jax.tree_util.tree_map(lambda leaf: leaf, made[1])  # another value, the same array
    host = np.asarray(values[0])
    strategy.run(lambda s: [x + 1 for x in s], (list(made),), options=options)
    return [np.asarray(values[0])[0], np.asarray(twin)[0], host[0]]


@case(expects=[1.0, 3.0])
def what_run_returned_unchanged_is_its_own_array(strategy):
    options = rx.RunOptions(donate_args=(0,))
    state = strategy.replicate(jnp.ones(3))
    kept = strategy.run(lambda s: s, (state,))
    for _ in range(2):
        state = strategy.run(lambda s: s + 1, (state,), options=options)
        state = strategy.replicate(state) if strategy.num_replicas_in_sync == 1 else state
    return [own(strategy, kept)[0], own(strategy, state)[0]]


@case(expects=[1.0, 3.0])
def what_a_function_returned_unchanged_is_its_own_array(strategy):
    options = rx.RunOptions(donate_args=(0,))
    state = strategy.replicate(jnp.ones(3))
    kept = rx.function(lambda s: s)(state)
    for _ in range(2):
        state = strategy.run(lambda s: s + 1, (state,), options=options)
        state = strategy.replicate(state) if strategy.num_replicas_in_sync == 1 else state
    return [own(strategy, kept)[0], own(strategy, state)[0]]


# --- callbacks that raise -----------------------------------------------------------------------------


class Boom(Exception):
    pass


def raising(armed):
    def callback(x):
        if armed:
            raise Boom("in a callback")
        return np.asarray(x)

    return callback


def callback_case(strategy, call, as_function):
    armed = []
    callback = raising(armed)
    a, b = variables(strategy, 1, 2)
    (k,) = keras_variables(strategy, 3)
    with strategy.scope():
        counts = rx.Variable(0.0, synchronization="ON_READ", aggregation="MEAN")
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)

    def step():
        a.assign_add(jnp.ones(3))
        counts.assign_add(1.0)
        seen = call(callback, shape, jnp.ones(3))
        k.assign_add(jnp.ones(3))
        return b.assign_add(jnp.ones(3)), seen

    run = rx.function(lambda: strategy.run(step)) if as_function else lambda: strategy.run(step)
    run()
    kept = a.value
    armed.append(True)
    try:
        jax.block_until_ready(run())
        error = "no error"
    except Exception as raised:
        error = "Boom: in a callback" if "Boom: in a callback" in str(raised) else repr(raised)
    after = [first(kept), first(a.value), first(b.value), first(k.value), float(counts.value)]
    armed.clear()
    run()
    return [error, after, [first(a.value), first(b.value), first(k.value), float(counts.value)]]


AFTER_BOOM = ["Boom: in a callback", [2.0, 2.0, 3.0, 4.0, 1.0], [3.0, 4.0, 5.0, 2.0]]


@case(expects=AFTER_BOOM)
def io_callback_that_raises(strategy):
    return callback_case(strategy, io_callback, as_function=False)


@case(expects=AFTER_BOOM)
def pure_callback_that_raises(strategy):
    return callback_case(strategy, jax.pure_callback, as_function=False)


@case(expects=AFTER_BOOM)
def pure_callback_that_raises_in_a_function(strategy):
    return callback_case(strategy, jax.pure_callback, as_function=True)


@case(expects=AFTER_BOOM)
def callback_that_raises_inside_a_scan(strategy):
    def call(callback, shape, x):
        def body(carry, _):
            return jax.pure_callback(callback, shape, carry), None

        return jax.lax.scan(jax.jit(body), x, None, length=2)[0]

    return callback_case(strategy, call, as_function=False)


# --- values that no program of ours wrote -------------------------------------------------------------


FOREIGN = {
    "numpy": lambda: np.full(3, 8.0),
    "numpy float64 as it is": lambda: np.full(3, 8.0, np.float64),
    "on one device": lambda: jnp.full(3, 8.0, jnp.float32),
    "committed elsewhere": lambda: jax.device_put(jnp.full(3, 8.0), jax.devices()[3]),
    "weakly typed": lambda: jnp.full(3, 8.0),
    "spread over other devices": lambda: jax.device_put(
        jnp.full(4, 8.0), jax.NamedSharding(jax.sharding.Mesh(jax.devices()[:4], ("x",)), jax.P("x"))
    )[:3],
    "python list": lambda: [8.0, 8.0, 8.0],
}


@case(expects=[[9.0] * 14, 1])
def foreign_values_do_not_compile_the_step_again(strategy):
    (v,) = variables(strategy, 1)
    (k,) = keras_variables(strategy, 1)

    def step():
        v.assign_add(jnp.ones(3))
        k.assign_add(jnp.ones(3))

    seen = []
    with compiled_programs() as names:
        strategy.run(step)
        program = names[-1]
        for make in FOREIGN.values():
            v.assign(make())
            k.assign(make())
            strategy.run(step)
            seen += [first(v.value), first(k.value)]
    return [seen, names.count(program)]


@case(expects=[9.0, 9.0, 1])
def weak_type_put_right_on_the_devices_does_not_compile_again(strategy):
    (k,) = keras_variables(strategy, 1)
    (other,) = keras_variables(strategy, 1)

    def step():
        k.assign_add(jnp.ones(3))
        other.assign(k.value)

    with compiled_programs() as names:
        strategy.run(step)
        program = names[-1]
        weak = jax.device_put(jnp.full(3, 8.0), strategy.topology.replicated)
        assert weak.weak_type
        k.assign(weak)
        strategy.run(step)
    return [first(k.value), first(other.value), names.count(program)]


# --- memory -------------------------------------------------------------------------------------------


@case(expects=[True, 3.0], on=("one_device", "mirrored_2"))
def memory_of_old_values_is_used_again(strategy):
    with strategy.scope():
        v = rx.Variable(np.zeros(1_000_000, np.float32))

    def step():
        v.assign_add(v + 1)

    def addresses():
        return {shard.data.unsafe_buffer_pointer() for shard in v.value.addressable_shards}

    strategy.run(step)
    before = addresses()
    strategy.run(step)
    return [addresses() == before, first(v.value)]


@case(expects=[True, False, True], on=("mirrored_2",))
def buffers_are_deleted_unless_somebody_holds_them(strategy):
    (v,) = variables(strategy, 1)
    add_one(strategy, [v])
    # A shard is no reference to the value: it shows the state of the buffer.
    shard = v.value.addressable_shards[0].data
    add_one(strategy, [v])
    kept = v.value
    shard_of_kept = kept.addressable_shards[0].data
    add_one(strategy, [v])
    state = strategy.replicate(jnp.ones(3))
    shard_of_state = state.stored.addressable_shards[0].data
    strategy.run(lambda s: s + 1, (state,), options=rx.RunOptions(donate_args=(0,)))
    return [shard.is_deleted(), shard_of_kept.is_deleted(), shard_of_state.is_deleted()]


if __name__ == "__main__":
    main(*sys.argv[1:])
