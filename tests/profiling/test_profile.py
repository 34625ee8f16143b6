"""The names in a trace of JAX's profiler, and that names cost nothing without a trace."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import replicax as rx
from replicax.errors import ContextError, InvalidArgumentError
from trace_files import events_in, files_in, names_of_operations

FEATURES = np.ones((8, 7), np.float32)


def built_model():
    model = keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.fixture(scope="module")
def without_kept_programs():
    """Programs are compiled here: one from the cache on disk has no names of operations in a trace."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def trace(tmp_path_factory, without_kept_programs):
    """The events of a trace with steps of ``run``, ``rx.function`` and ``fit``; and the full names of its operations."""
    strategy = rx.MirroredStrategy(["cpu:1", "cpu:2"])
    with strategy.scope():
        model, of_loop = built_model(), built_model()
        optimizer = keras.optimizers.SGD(0.1)

    def train_step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(of_loop(x, training=True)[:, 0] ** 2)
        gradients = tape.gradient(loss, of_loop.trainable_variables)
        optimizer.apply_gradients(zip(gradients, of_loop.trainable_variables))
        context = rx.get_replica_context()
        return context.all_reduce("SUM", loss), context.all_gather(x, axis=0)

    def evaluate(x):
        return jnp.mean(x)

    @rx.function
    def test_step(x):
        return strategy.reduce("MEAN", strategy.run(evaluate, args=(x,)), axis=None)

    dataset = rx.data.from_arrays(FEATURES).batch(8)
    (x,) = strategy.experimental_distribute_dataset(dataset)
    folder = tmp_path_factory.mktemp("trace")

    def steps(profile):
        for _ in range(2):
            result = strategy.run(train_step, args=(x,))
            test_step(x)
        with profile.step(7, "both"):
            strategy.run(train_step, args=(x,))
            result = test_step(x)
        model.fit(FEATURES, FEATURES[:, :1], verbose=0)
        jax.block_until_ready(result)

    with rx.profile(folder / "first") as profile:  # compiles
        steps(profile)
    num_programs = strategy._own_parts.runner.num_programs
    with rx.profile(folder / "second") as profile:
        steps(profile)
    assert strategy._own_parts.runner.num_programs == num_programs
    (path,) = files_in(profile.logdir)
    return events_in(path), names_of_operations(path)


def test_steps_are_numbered_and_have_the_names_of_their_functions(trace):
    events, _ = trace
    steps = [(name.rpartition(".")[2], stats["step_num"]) for name, stats in events if "step_num" in stats]
    assert steps == [
        ("train_step", 0),
        ("test_step", 0),
        ("train_step", 1),
        ("test_step", 1),
        ("both", 7),
        ("train_step", 0),  # of fit
    ]
    parts = [name for name, stats in events if name.endswith("train_step") and "step_num" not in stats]
    assert parts


def test_operations_name_their_replica_and_collectives_their_purpose(trace):
    events, names = trace
    replicas = {
        name: (stats["device"], stats["device_ordinal"]) for name, stats in events if "device" in stats
    }
    assert replicas == {"replica 0": ("cpu:1", 1), "replica 1": ("cpu:2", 2)}
    seen = {}
    for _, stats in events:
        scopes = re.split("[/:()]", names.get((stats.get("program_id"), stats.get("hlo_op")), ""))
        for name in ("replica", "sum_gradients", "share_variables", "all_reduce", "all_gather"):
            if name in scopes:
                seen.setdefault(name, set()).add(stats["device_ordinal"])
    both = {1, 2}
    assert seen == dict.fromkeys(
        ("replica", "sum_gradients", "share_variables", "all_reduce", "all_gather"), both
    )


def test_folder_that_is_not_a_path_raises():
    with pytest.raises(InvalidArgumentError, match=r"logdir.*NoneType"):
        with rx.profile(None):
            pass


def test_one_trace_at_a_time_and_python_calls_only_if_requested(tmp_path):
    with rx.profile(tmp_path / "without"):
        with pytest.raises(ContextError, match=r"inside rx\.profile"):
            with rx.profile(tmp_path / "inner"):
                pass
    with rx.profile(tmp_path / "with", python=True) as profile:
        with pytest.raises(InvalidArgumentError, match="number must be a whole number"):
            profile.step(-1)
        np.mean([1.0])
    without, with_python = (
        [name for name, _ in events_in(files_in(tmp_path / folder)[0]) if name.startswith("$")]
        for folder in ("without", "with")
    )
    assert not without
    assert with_python
