"""Keras's own steps, split by rows as processes on CPUs run them: which steps can be split, in how many sums, and that
they are equal."""

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close
from fit_models import SUBJECTS
from replicax._src.keras.phases import TEST, TRAIN
from splitting import plan_of, run_by_rows

# Batch normalisation waits for the mean, the variance and their gradients; a mask waits for the number of unmasked
# rows.
ROUNDS = {
    "dense": (5, 1),
    "built_by_fit": (5, 1),
    "convolution": (5, 1),
    "gru_per_time_step": (2, 2),
    "add_loss": (3, 2),
    "custom_train_step": (3, 1),
    "mixed_bfloat16": (5, 1),
    "dice": (2, 2),
}
SIZES = (70, 64, 65)
SHORT = {
    "dense",
    "custom_train_step",
    "dice",
}  # recurrent steps: tests/tracing/test_row_partitioner.py has loops
CASES = [
    pytest.param(
        name,
        phase,
        id=f"{name}-{phase.name}",
        marks=[] if name in SHORT and phase is TRAIN else pytest.mark.long,
    )
    for name in SUBJECTS
    for phase in (TRAIN, TEST)
]
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras, in BinaryIoU


def step_of(name, phase):
    """The step as a function of the state and a batch, with both."""
    subject = SUBJECTS[name]
    keras.utils.set_random_seed(1)
    model = subject.build()
    rows = subject.rows()
    model.train_on_batch(*rows)
    state = tuple([variable.value for variable in group] for group in phase.variables_of(model))
    step = getattr(model, phase.step_name)
    return lambda state, batch: step(state, batch), state, rows


@pytest.mark.rest
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_step_split_by_rows_equals_the_unsplit_step(name, phase):
    step, state, rows = step_of(name, phase)
    plan, _ = plan_of(step, state, rows, SIZES)
    assert plan.num_rounds == ROUNDS.get(name, (1, 1))[phase is TEST]
    got, _ = run_by_rows(step, state, rows, SIZES)
    expected = jax.tree_util.tree_leaves(jax.jit(step)(state, rows))
    subject = SUBJECTS[name]
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, subject.weight_rtol, subject.weight_atol)


@pytest.mark.parametrize(("rate", "is_split"), [(0.0, True), (0.5, False)])
def test_devices_of_one_process_sum_all_arrays_of_a_step_together_unless_it_draws_bits(rate, is_split):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layers = [
            keras.layers.Dense(4),
            *([keras.layers.Dropout(rate)] if rate else []),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile("adam", "mse")
    rows = np.zeros((8, 2), np.float32), np.zeros((8, 3), np.float32)
    text = strategy.lower(model.fit, args=rows, kwargs={"batch_size": 8}).compile().as_text()
    assert ("sum_together" in text) is is_split
