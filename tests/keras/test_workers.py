"""The comparison of workers before one of Keras's loops. The processes are threads, and a list is the channel."""

import itertools
import os
import threading
import types

import keras
import numpy as np
import pytest

from replicax._src.cluster.gathered import GatheredValues
from replicax._src.keras import loop_callbacks
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.workers import start_together
from replicax.errors import ProgramMismatchError, WorkersDifferError


class TwoPeers:
    """One process of two, which exchange values through a barrier."""

    names = ("worker 0", "worker 1")

    def __init__(self, number, values, barrier, *, tolerates_failures=False):
        self.tolerates_failures = tolerates_failures
        self.number, self.values, self.barrier = number, values, barrier
        self.is_leader = number == 0

    def gather(self, topic, value, what):
        self.values[self.number] = value
        self.barrier.wait(timeout=60)
        found = list(self.values)
        self.barrier.wait(timeout=60)
        return GatheredValues(found, (0, 1), self.names, self.number)


def errors_of(*calls, **options):
    """The error of each worker, given the method and arguments that it calls, and options of its peers."""
    values, barrier, errors = [None, None], threading.Barrier(2), [None, None]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def call(number):
        method, given = calls[number]
        try:
            start_together(TwoPeers(number, values, barrier, **options), FitCall(model, method, given))
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return errors


x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


@pytest.mark.timeout(120)
def test_different_methods_are_named_before_their_arguments():
    for error in errors_of(("fit", {"x": x, "y": y}), ("predict", {"x": x})):
        assert type(error) is ProgramMismatchError
        here = f"at {__file__}:"
        for said in (f"worker 0: fit, {here}", f"worker 1: predict, {here}", "in the same order"):
            assert said in str(error)


@pytest.mark.timeout(120)
def test_one_method_with_different_arguments_names_the_argument():
    for error in errors_of(("fit", {"x": x, "y": y}), ("fit", {"x": x, "y": 2 * y})):
        assert type(error) is WorkersDifferError
        assert "different values of `y`" in str(error)
    assert errors_of(("fit", {"x": x, "epochs": 2}), ("fit", {"x": x, "epochs": 2})) == [None, None]


@pytest.mark.timeout(120)
def test_error_of_different_rows_names_what_the_mode_takes():
    calls = ("fit", {"x": x, "y": y}), ("fit", {"x": 2 * x, "y": y})
    for error in errors_of(*calls):
        assert "pass strategy.distribute_datasets_from_function(...)" in str(error)
    for error in errors_of(*calls, tolerates_failures=True):
        assert "use save_on_failure=True instead of fault tolerance" in str(error)
        assert "distribute_datasets_from_function" not in str(error)


class SecondOfTwo:
    """The control channel of the second of two processes.

    Args:
      values: For each file, the value that the first process tells when it is written; None if it dies before that.
      all_save: False if the first process has no callbacks that save.
    """

    def __init__(self, values, *, all_save=True):
        self.is_leader, self._values, self._all_save = False, list(values), all_save
        self.names, self.num_gathered = ("worker 0", "worker 1"), 0

    def gather(self, topic, value, what):
        self.num_gathered += 1
        if what == "to start fit":
            return GatheredValues([value if self._all_save else [], value], (0, 1), self.names, 1)
        if not self.is_leader:
            told = self._values.pop(0)
            if told is not None:
                return GatheredValues([[told], value], (0, 1), self.names, 1)
        self.is_leader = True
        return GatheredValues([value], (1,), self.names, 1)


def saved_in_epochs(saving, peers, losses, folder):
    """Returns the number of new files after each epoch, of a callback whose file names differ."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    saving.set_model(model)
    strategy = types.SimpleNamespace(topology=types.SimpleNamespace(peers=peers), variable_placement=None)
    seen = [0]
    with loop_callbacks._written_by_chief(strategy, [saving]):
        for epoch, loss in enumerate(losses):
            saving.on_epoch_end(epoch, {"loss": loss})
            seen.append(len(os.listdir(folder)))
    return [after - before for before, after in itertools.pairwise(seen)]


def model_checkpoint(folder, **options):
    return keras.callbacks.ModelCheckpoint(
        f"{folder}/{{epoch}}.weights.h5", monitor="loss", mode="min", save_weights_only=True, **options
    )


ignore_copies = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)


@ignore_copies
def test_file_of_an_epoch_is_written_by_the_next_chief_if_the_first_one_dies_before_it_is_complete(tmp_path):
    losses = [1.0, 1.0, 1.0]
    assert saved_in_epochs(
        model_checkpoint(tmp_path), SecondOfTwo([(0.0).hex(), None]), losses, tmp_path
    ) == [
        0,
        1,
        1,
    ]


@ignore_copies
def test_backup_is_written_by_the_next_chief_if_the_first_one_dies_before_it_is_complete(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    new = saved_in_epochs(backup, SecondOfTwo([(0.0).hex(), None]), [1.0, 1.0], tmp_path)
    assert new[0] == 0
    assert new[1] > 0


@ignore_copies
def test_next_chief_overwrites_no_better_model_of_the_last_one(tmp_path):
    saving = model_checkpoint(tmp_path, save_best_only=True)
    peers = SecondOfTwo([(0.5).hex(), None])
    assert saved_in_epochs(saving, peers, [0.5, 0.7, 0.3], tmp_path) == [0, 0, 1]


@ignore_copies
def test_callbacks_that_one_process_alone_has_do_not_wait_for_others(tmp_path):
    peers = SecondOfTwo([], all_save=False)
    peers.is_leader = True
    assert saved_in_epochs(model_checkpoint(tmp_path), peers, [1.0, 1.0], tmp_path) == [1, 1]
    assert peers.num_gathered == 1
