"""Keras's own steps as local programs: those of one device, with the same bits whoever runs which replica and whatever
failed before."""

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close
from fit_models import SUBJECTS
from local_processes import Cut, Team, assert_same_bits, one_device
from replicax._src.keras.phases import TEST, TRAIN
from replicax._src.keras.step_functions import GlobalStepFunction
from replicax._src.lowering.local_programs import LocalStep

NUM_REPLICAS, NUM_STEPS = 3, 5
# Models that compile slowly, or are like others.
LONG = {"built_by_fit", "lstm", "gru_per_time_step", "attention", "mixed_bfloat16", "dice"}
CASES = [
    pytest.param(
        name, phase, id=f"{name}-{phase.name}", marks=[] if (name, phase) == ("dense", TRAIN) else mark
    )
    for name in SUBJECTS
    for phase in (TRAIN, TEST)
    for mark in [pytest.mark.rest if phase is TRAIN and name not in LONG else pytest.mark.long]
]
pytestmark = [  # Keras, in BinaryIoU
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`"),
]


def weighted(rows):
    """Rows with the weights that ``class_weight={0: 2.0, 1: 0.5}`` gives them; of several outputs, without."""
    x, y = rows
    if isinstance(y, dict) or y.ndim > 2:
        return rows
    classes = np.argmax(y, -1) if y.ndim > 1 and y.shape[1] > 1 else y.reshape(-1)
    return x, y, np.asarray([2.0, 0.5, 1.0], "float32")[classes.astype("int32")]


def step_of(name, phase):
    """The step as ``fit`` or ``evaluate`` traces it, a function that returns new arrays of its state, and a batch."""
    subject = SUBJECTS[name]
    keras.utils.set_random_seed(1)
    strategy = rx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = subject.build()
    rows = weighted(subject.rows())
    model.train_on_batch(*rows)
    function = GlobalStepFunction(model, phase, strategy)
    values = [[np.array(v.value) for v in group] for group in phase.variables_of(model)]
    return function._traced_step, lambda: [list(map(jax.numpy.asarray, group)) for group in values], rows


def trained(step, state, rows, assignment, cuts=(None,) * NUM_STEPS):
    team = Team(step, state, NUM_REPLICAS, assignment)
    outputs = []
    for cut_before in cuts:
        if cut_before is not None:
            with pytest.raises(Cut):
                team.run(rows, cut_before)
        outputs.append(team.run(rows)[0])
    for process in range(1, len(assignment)):
        assert_same_bits(team.values(process), team.values())
    return team.values(), outputs


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_keras_step_as_local_programs_is_the_step_of_one_device(name, phase):
    function, state, rows = step_of(name, phase)
    step = LocalStep(function, name, one_device(), NUM_REPLICAS)
    values, outputs = trained(step, state, rows, [[0], [1], [2]])
    one, expected = jax.jit(function), tuple(state())
    subject = SUBJECTS[name]
    for out in outputs:
        logs, expected = one(expected, rows)
        assert_close(out, logs, max(subject.rtol, 1e-5))
    assert_close(values, jax.tree.leaves(expected), subject.weight_rtol, subject.weight_atol)

    last = len(Team(step, state, NUM_REPLICAS, [[0]]).programs(rows).rounds)
    assert last > 0, "the step is split by rows"
    again = trained(step, state, rows, [[0, 2], [1]], (0, None, last // 2, last, None))
    assert_same_bits(again, (values, outputs))
