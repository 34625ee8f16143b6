"""The cache of programs: which functions count as the same, what is traced again, what is freed."""

import functools
import gc
import logging
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


class Traces:
    """Counts how often the calling function is traced."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


def first(result):
    return np.asarray(result.values[0] if isinstance(result, rx.PerReplica) else result)


# --- functions ----------------------------------------------------------------------------------------

NOTEBOOK_CELL = """
def step(x):
    traces()
    return model(x)
"""


def test_defining_a_function_again_after_a_global_has_changed(strategy):
    """A notebook: the step is defined again with equal text, after ``model = build()``."""
    notebook = types.ModuleType("notebook")
    notebook.traces = Traces()
    results = []
    for scale in (1.0, 2.0, 3.0):
        notebook.model = lambda x, scale=scale: x * scale
        exec(NOTEBOOK_CELL, notebook.__dict__)
        results += [float(first(strategy.run(notebook.step, args=(jnp.float32(5.0),)))) for _ in range(2)]
    assert results == [5.0, 5.0, 10.0, 10.0, 15.0, 15.0]
    assert notebook.traces.count == 3


def test_changed_global_object_is_noticed_without_a_new_definition(strategy):
    notebook = types.ModuleType("notebook")
    notebook.traces = Traces()
    exec(NOTEBOOK_CELL, notebook.__dict__)
    for layer in (keras.layers.Dense(1), keras.layers.Dense(2)):
        layer.build((None, 3))
        notebook.model = layer
        assert first(strategy.run(notebook.step, args=(jnp.ones((4, 3)),))).shape == (4, layer.units)
    assert notebook.traces.count == 2


FACTOR = 1.0
OFFSETS = {"a": 1.0}


def scaled(x):
    return x * FACTOR


def calls_scaled(x):
    return scaled(x) + 1


def test_a_changed_global_number_is_noticed_also_in_functions_that_are_called(strategy, monkeypatch):
    x = jnp.float32(3.0)
    assert float(first(strategy.run(calls_scaled, args=(x,)))) == 4.0
    monkeypatch.setattr("builtins.print", print)  # names that are no globals of ours do no harm
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert float(first(strategy.run(calls_scaled, args=(x,)))) == 7.0
    assert strategy.runner.num_programs == 2


def test_fresh_lambdas_are_one_program(strategy):
    traces = Traces()
    for value in range(4):
        result = strategy.run(lambda x: (traces(), x * 2)[1], args=(jnp.float32(value),))
        assert float(first(result)) == 2 * value
    assert traces.count == 1
    assert strategy.runner.num_programs == 1


def test_lambdas_of_other_code_are_other_programs(strategy):
    x = jnp.float32(3.0)
    results = [strategy.run(fn, args=(x,)) for fn in (lambda x: x + 1, lambda x: x + 2, lambda x: x - 1)]
    assert [float(first(r)) for r in results] == [4.0, 5.0, 2.0]


def test_changed_defaults_are_noticed(strategy):
    def make(factor, offset):
        def step(x, factor=factor, *, offset=offset):
            return x * factor + offset

        return step

    x = jnp.float32(3.0)
    for factor, offset in ((1.0, 0.0), (2.0, 0.0), (2.0, 1.0), (1.0, 0.0)):
        assert float(first(strategy.run(make(factor, offset), args=(x,)))) == 3 * factor + offset
    assert strategy.runner.num_programs == 3


def test_changed_closures_are_noticed(strategy):
    def make(name, number, items):
        return lambda x: x * number + len(name) + sum(items)

    x = jnp.float32(3.0)
    items = [1]
    for name, number in (("a", 1), ("ab", 1), ("ab", 2)):
        assert float(first(strategy.run(make(name, number, items), args=(x,)))) == 3 * number + len(name) + 1


def test_changed_python_state_is_retraced_and_reported(strategy, caplog):
    """Slow, but never stale: each value of the counter is a different constant of the program."""
    count = 0

    def step(x):
        nonlocal count
        count += 1
        return x + count

    with caplog.at_level(logging.WARNING, logger="replicax"):
        results = [float(first(strategy.run(step, args=(jnp.float32(1.0),)))) for _ in range(6)]
    assert results == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    line = f"{__file__}:{step.__code__.co_firstlineno + 2} in step"
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        f"the closure variable 'count' changed: 4 became 5, and the function assigns it at {line}" in message
    )
    for cure in ("every call compiles", "outside", "jnp.asarray(count)", "rx.Variable: count.assign_add(1)"):
        assert cure in message


counted_globally = 0


def count_globally():
    global counted_globally
    counted_globally = counted_globally + 1


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("is_function", [False, True])
def test_global_counter_in_an_inner_function_is_reported_by_name(num_replicas, is_function, caplog):
    strategy = rx.MirroredStrategy(num_replicas)

    def step(x):
        count_globally()
        return x + counted_globally

    run = lambda x: strategy.run(step, args=(x,))  # noqa: E731
    call = rx.function(run) if is_function else run
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for _ in range(6):
            call(jnp.float32(1.0))
    line = f"{__file__}:{count_globally.__code__.co_firstlineno + 2} in count_globally"
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the global variable 'counted_globally' changed: " in message
    assert f"the function assigns it at {line}" in message
    assert "rx.Variable: counted_globally.assign_add(1)" in message


def test_value_of_a_closure_that_changes_is_reported_with_its_name_and_the_cure(strategy, caplog):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for newRate in (1, 2, 3, 4, 5):
            strategy.run(lambda x: x * newRate, args=(jnp.float32(1.0),))  # noqa: B023
        for mode in "abcde":
            strategy.run(lambda x: x + len(mode), args=(jnp.float32(1.0),))  # noqa: B023
    number, text = [record.getMessage() for record in caplog.records]
    assert "the closure variable 'newRate' changed: 4 became 5" in number
    assert "Pass it to the function as an array argument, jnp.asarray(newRate)" in number
    assert "assign_add" not in number
    assert "the closure variable 'mode' changed: 'd' became 'e'" in text
    assert "jnp.asarray" not in text


class Trainer:
    def __init__(self, factor):
        self.factor = factor
        self.traces = Traces()

    def step(self, x):
        self.traces()
        return x * self.factor

    def __call__(self, x):
        return self.step(x)


@pytest.mark.parametrize(
    "method", [lambda trainer: trainer.step, lambda trainer: trainer], ids=["method", "callable"]
)
def test_bound_methods_and_callables_belong_to_their_object(strategy, method):
    x = jnp.float32(3.0)
    trainers = [Trainer(1.0), Trainer(2.0)]
    results = [float(first(strategy.run(method(t), args=(x,)))) for t in trainers * 2]
    assert results == [3.0, 6.0, 3.0, 6.0]
    assert [t.traces.count for t in trainers] == [1, 1]


def test_partials_are_compared_by_their_contents(strategy):
    traces = Traces()

    def step(x, factor, offset=0):
        traces()
        return x * factor + offset

    x = jnp.float32(3.0)
    for factor, offset in ((1, 0), (1, 0), (2, 0), (2, 5), (2, 5)):
        result = strategy.run(functools.partial(step, factor=factor, offset=offset), args=(x,))
        assert float(first(result)) == 3 * factor + offset
    assert traces.count == 3


def test_functions_made_by_rx_function_are_seen_through(strategy):
    @rx.function
    def inner(x):
        return x * 2

    x = jnp.float32(3.0)
    assert float(first(strategy.run(inner, args=(x,)))) == 6.0
    assert float(first(strategy.run(lambda x: inner(x) + 1, args=(x,)))) == 7.0


def test_recursive_functions_have_a_key(strategy):
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    assert float(first(strategy.run(power, args=(jnp.float32(2.0), 5)))) == 32.0


def even(x, n):
    return x if n == 0 else odd(x + 1, n - 1)


def odd(x, n):
    return even(x * 2, n - 1)


def test_mutually_recursive_functions_have_a_key(strategy):
    assert float(first(strategy.run(even, args=(jnp.float32(1.0), 4)))) == 10.0
    assert float(first(strategy.run(even, args=(jnp.float32(1.0), 4)))) == 10.0
    assert strategy.runner.num_programs == 1


# --- arguments ----------------------------------------------------------------------------------------


def test_numbers_are_distinguished_by_type(strategy):
    """``1 == 1.0 == True``, but their programs have other dtypes."""
    x = jnp.asarray([1, 2], jnp.bfloat16)
    results = [
        strategy.run(lambda x, a: x * a, args=(x, a)) for a in (1, 1.0, True, np.float32(1), np.int32(1))
    ]
    assert [str(first(r).dtype) for r in results] == [
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "float32",
        "bfloat16",
    ]
    kinds = [
        strategy.run(lambda x, a: (x, type(a).__name__)[1], args=(x, a)) for a in (1, 1.0, True, None, "1")
    ]
    assert kinds == ["int", "float", "bool", "NoneType", "str"]


def test_enums_and_strings_select_programs(strategy):
    result = lambda op: float(  # noqa: E731
        first(
            strategy.run(
                lambda x, op: rx.get_replica_context().all_reduce(op, x), args=(jnp.float32(2.0), op)
            )
        )
    )
    assert [result("SUM"), result("MEAN"), result(rx.ReduceOp.SUM), result("SUM")] == [4.0, 2.0, 4.0, 4.0]


def test_a_changing_float_is_traced_at_most_twice(strategy):
    """A learning rate is a constant at first, and an input from its second value on."""
    traces = Traces()

    def step(x, rate):
        traces()
        return x * rate

    x = jnp.asarray(3.0, jnp.bfloat16)
    for rate in (0.5, 0.25, 0.125, 2.0, 0.5):
        result = first(strategy.run(step, args=(x, rate)))
        assert (float(result), str(result.dtype)) == (3 * rate, "bfloat16")
    assert traces.count == 2


def test_a_float_that_never_changes_stays_a_python_number(strategy):
    def step(x, rate):
        return x if rate > 0.1 else -x

    for _ in range(3):
        assert float(first(strategy.run(step, args=(jnp.float32(3.0), 0.5)))) == 3.0


def test_changing_ints_are_constants(strategy):
    def step(x, n):
        return sum(x for _ in range(n))

    assert [float(first(strategy.run(step, args=(jnp.float32(3.0), n)))) for n in (1, 2, 1)] == [
        3.0,
        6.0,
        3.0,
    ]
    assert strategy.runner.num_programs == 2


def test_other_shapes_dtypes_and_structures_are_other_programs(strategy):
    traces = Traces()

    def step(pytree):
        traces()
        return jax.tree_util.tree_map(lambda x: x + 1, pytree)

    arguments = [
        {"a": jnp.ones(2)},
        {"a": jnp.ones(3)},
        {"a": jnp.ones(2, "int32")},
        {"b": jnp.ones(2)},
        (jnp.ones(2),),
        {"a": np.ones(2, "float32")},  # as the first
    ]
    for argument in arguments:
        strategy.run(step, args=(argument,))
    assert traces.count == 5


def test_per_replica_and_plain_arrays_are_other_programs(strategy):
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    fn = lambda x: rx.get_replica_context().all_reduce("SUM", x)  # noqa: E731
    assert [float(first(strategy.run(fn, args=(x,)))) for x in (jnp.float32(1.0), own)] == [2.0, 1.0]


def test_x64_is_part_of_the_key(strategy):
    fn = lambda: jnp.ones(()) * 2  # noqa: E731
    dtypes = [first(strategy.run(fn)).dtype]
    with jax.enable_x64(True):
        dtypes.append(first(strategy.run(fn)).dtype)
    dtypes.append(first(strategy.run(fn)).dtype)
    assert dtypes == ["float32", "float64", "float32"]


# --- arrays in closures -------------------------------------------------------------------------------


def test_closure_arrays_become_inputs(strategy):
    traces = Traces()

    def step(x):
        traces()
        return jnp.sum(x * 2)

    for value in (1.0, 2.0, 3.0):
        x = jnp.full(4, value)
        assert float(first(strategy.run(lambda: step(x)))) == 8 * value  # noqa: B023
    assert traces.count == 1


def test_closure_values_of_all_kinds_become_inputs(strategy):
    traces = Traces()
    for value in (1.0, 2.0):
        array = np.full(2, value, "float32")
        own = strategy.experimental_distribute_values_from_function(
            lambda context, value=value: np.float32(value * context.replica_id_in_sync_group)
        )
        shared = strategy.replicate(jnp.float32(value))
        batch = {"x": array, "y": (array, own)}

        def step(array=None):
            traces()
            return jnp.sum(batch["x"]) + jnp.sum(batch["y"][0]) + batch["y"][1] + shared + own  # noqa: B023

        result = strategy.run(step)
        assert [float(v) for v in result.values] == [5 * value, 7 * value]
    assert traces.count == 1


def test_a_closure_array_of_another_shape_is_another_program(strategy):
    for size in (2, 3):
        x = jnp.ones(size)
        assert float(first(strategy.run(lambda: jnp.sum(x)))) == size  # noqa: B023
    assert strategy.runner.num_programs == 2


def test_a_random_key_in_a_closure_is_an_input(strategy):
    traces = Traces()
    drawn = set()
    for seed in (0, 1):
        key = jax.random.key(seed)

        def step():
            traces()
            return jax.random.uniform(key, ())  # noqa: B023

        drawn.add(float(first(strategy.run(step))))
    assert len(drawn) == 2
    assert traces.count == 1


def test_a_numpy_array_changed_in_place_is_not_a_stale_constant(strategy):
    x = np.ones(2, "float32")
    results = []
    for value in (1.0, 2.0):
        x[:] = value
        results.append(float(first(strategy.run(lambda: jnp.sum(x * 2)))))
    assert results == [4.0, 8.0]


def test_another_thread_finds_the_array_in_the_closure_while_a_function_is_traced(strategy):
    """A thread that makes batches, say, of the same arrays."""
    scale, found = np.ones(2, "float32"), []

    def read():
        found.append(scale)

    def step():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return jnp.sum(scale)

    assert float(first(strategy.run(step))) == 2
    assert found
    assert all(value is scale for value in found)


def test_a_function_that_calls_itself_and_a_generator_take_the_array_of_each_call(strategy):
    results = []
    for value in (1.0, 2.0):
        scale = np.full(2, value, "float32")

        def powers(number):
            if number == 0:
                return scale  # noqa: B023
            return powers(number - 1) * scale  # noqa: B023

        def step(number=2):
            pieces = (scale * i for i in range(3))  # noqa: B023
            return jnp.sum(sum(pieces)) + jnp.sum(powers(number))

        results.append(float(first(strategy.run(step))))
    assert results == [2 * (3 * value + value**3) for value in (1.0, 2.0)]


def test_a_backward_function_keeps_no_array_of_the_closure(strategy):
    """It runs when the function has returned. It is refused, as it would be silently stale in the next call."""

    def make(scale):
        def step(w):
            @jax.custom_vjp
            def doubled(x):
                return x * 2

            doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (ct * scale,))
            with rx.GradientTape() as tape:
                tape.watch(w)
                loss = jnp.sum(doubled(w))
            return tape.gradient(loss, w)

        return step

    with pytest.raises(rx.errors.TraceError):
        strategy.run(make(jnp.full(2, 3.0)), (jnp.ones(2),))


# --- rx.function --------------------------------------------------------------------------------------


def test_rx_function_follows_the_same_rules(strategy):
    traces = Traces()

    @rx.function
    def step(x, rate):
        traces()
        return strategy.reduce("SUM", strategy.run(lambda x: x * rate, args=(x,)), axis=None)

    results = [float(step(jnp.float32(3.0), rate)) for rate in (1.0, 2.0, 4.0)]
    assert results == [6.0, 12.0, 24.0]
    assert traces.count == 2


# --- what is freed ------------------------------------------------------------------------------------


def trained_model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()

    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.mean(model(x) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return loss

    strategy.run(step, args=(jnp.ones((2, 2)),))
    return model, step


def test_programs_are_freed_when_their_model_dies(strategy):
    for _ in range(3):
        model, step = trained_model(strategy)
        reference = weakref.ref(model)
        assert strategy.runner.num_programs == 1
        del model, step
        gc.collect()
        assert reference() is None
        assert strategy.runner.num_programs == 0


@pytest.mark.parametrize("place", ["run", "function", "steps"])
def test_arguments_of_the_newest_trace_are_freed(strategy, place):
    """The cache keeps their names, for the reason of the next trace."""

    def call(array):
        if place == "run":
            strategy.run(lambda batch: batch["x"].sum(), args=({"x": array},))
        elif place == "function":
            rx.function(lambda batch: batch["x"].sum())({"x": array})
        else:
            batches = iter(strategy.experimental_distribute_dataset([np.ones(4, np.float32)]))
            strategy.run_steps(lambda state, batch: (state, batch.sum()), batches, 1, state={"x": array})

    array = jnp.ones(1000) + 1
    reference = weakref.ref(array)
    call(array)
    del array
    gc.collect()
    assert reference() is None


def test_programs_of_a_method_are_freed_with_its_object(strategy):
    trainer = Trainer(2.0)
    strategy.run(trainer.step, args=(jnp.float32(3.0),))
    assert strategy.runner.num_programs == 1
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
    assert strategy.runner.num_programs == 0


def test_new_object_at_the_address_of_a_dead_one_is_distinguished(strategy):
    x = jnp.float32(1.0)
    for factor in range(20):
        trainer = Trainer(float(factor))
        assert float(first(strategy.run(trainer.step, args=(x,)))) == factor
        del trainer


def test_static_arguments_are_compared_by_identity_and_released(strategy):
    traces = Traces()

    def step(x, config):
        traces()
        return x * config.factor

    configs = [Trainer(2.0), Trainer(3.0)]
    results = [float(first(strategy.run(step, args=(jnp.float32(2.0), c)))) for c in configs * 2]
    assert results == [4.0, 6.0, 4.0, 6.0]
    assert traces.count == 2
    del configs
    gc.collect()
    assert strategy.runner.num_programs == 0


# --- retracing is reported ----------------------------------------------------------------------------


def test_a_retrace_in_a_hot_loop_is_reported_once_with_the_reason(strategy, caplog):
    def step(x):
        return jnp.sum(x)

    with caplog.at_level(logging.WARNING, logger="replicax"):
        for size in range(1, 9):
            strategy.run(step, args=(jnp.ones(size),))
    (record,) = [r for r in caplog.records if "traced" in r.getMessage()]
    message = record.getMessage()
    assert "step" in message
    assert "args[0]: float32[4] became float32[5]" in message
    assert "pad arrays to a few sizes" in message
    assert "array arguments" not in message


def test_a_retrace_for_another_dtype_or_value_gets_other_advice(strategy, caplog):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for number in range(6):
            strategy.run(lambda x, n: x * n, args=(jnp.ones(2), number))
    (record,) = [r for r in caplog.records if "traced" in r.getMessage()]
    assert "as array arguments" in record.getMessage()
    assert "pad" not in record.getMessage()


def test_model_recreated_in_each_step_is_reported_by_name(strategy, caplog):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for _ in range(7):
            helper = Trainer(1.0)
            strategy.run(lambda x: helper.step(x), args=(jnp.float32(1.0),))  # noqa: B023
    (record,) = [r for r in caplog.records if "traced" in r.getMessage()]
    assert "'helper' is another object" in record.getMessage()


def test_a_steady_loop_reports_nothing(strategy, caplog):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for rate in np.linspace(0.1, 0.9, 9):
            strategy.run(lambda x, rate: x * rate, args=(jnp.ones(2), float(rate)))
    assert not [r for r in caplog.records if "traced" in r.getMessage()]
