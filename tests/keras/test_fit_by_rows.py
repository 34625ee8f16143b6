"""Keras's own steps, split by rows as processes on CPUs run them: which steps can be split, in how many sums, and that
they are equal."""

import jax
import keras
import pytest

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
