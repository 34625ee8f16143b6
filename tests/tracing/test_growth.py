"""The work of a trace for one variable does not grow with their number. Calls are counted, not timed."""

import cProfile
import gc
import pstats
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx

PACKAGE = str(Path(rx.__file__).parent)


def step_of_variables(num_variables, optimizer=None):
    if optimizer is None:
        variables = [rx.Variable(np.ones(2, np.float32)) for _ in range(num_variables)]
    else:
        variables = [keras.Variable(np.ones(2, np.float32)) for _ in range(num_variables)]
        optimizer.build(variables)

    def step(rows):
        with rx.GradientTape() as tape:
            loss = jnp.sum(jnp.stack([jnp.vdot(variable.value, rows[0]) for variable in variables]))
        gradients = tape.gradient(loss, variables)
        if optimizer is not None:
            optimizer.apply(gradients, variables)
            return loss
        for variable, gradient in zip(
            variables, rx.get_replica_context().all_reduce("SUM", gradients), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step


def num_calls_to_lower(num_variables, make_optimizer):
    """The calls of functions of replicax, generators included."""
    strategy = rx.MirroredStrategy(2)
    with strategy.scope():
        step = step_of_variables(num_variables, make_optimizer())
    (batch,) = strategy.experimental_distribute_dataset([np.ones((4, 2), np.float32)])
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # what earlier tests have left is released by calls that would count
    try:
        profile.runcall(strategy.lower, step, args=(batch,))
    finally:
        gc.enable()
    stats = pstats.Stats(profile).stats
    return sum(num for (file, _, _), (_, num, *_) in stats.items() if file.startswith(PACKAGE))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda: None, id="variables"),
        pytest.param(lambda: keras.optimizers.SGD(0.1), id="keras", marks=pytest.mark.rest),
    ],
)
def test_calls_of_a_trace_are_proportional_to_the_variables(make_optimizer):
    num_calls_to_lower(2, make_optimizer)  # the first trace of a process also loads what it needs
    few, more, many = (num_calls_to_lower(num, make_optimizer) for num in (10, 40, 70))
    assert many - more < 1.02 * (more - few)
