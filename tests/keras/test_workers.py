"""The comparison of workers before one of Keras's loops. The processes are threads, and a list is the channel."""

import threading

import keras
import numpy as np
import pytest

from replicax._src.keras.workers import start_together
from replicax.errors import ProgramMismatchError, WorkersDifferError


class TwoPeers:
    """One process of two, which exchange values through a barrier."""

    names = ("worker 0", "worker 1")

    def __init__(self, number, values, barrier):
        self.number, self.values, self.barrier = number, values, barrier
        self.is_leader = number == 0

    def gather(self, topic, value, what):
        self.values[self.number] = value
        self.barrier.wait(timeout=60)
        found = list(self.values)
        self.barrier.wait(timeout=60)
        return found


def errors_of(*calls):
    """The error of each worker, given the method and arguments that it calls."""
    values, barrier, errors = [None, None], threading.Barrier(2), [None, None]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def call(number):
        method, given = calls[number]
        try:
            start_together(TwoPeers(number, values, barrier), method, model, given)
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
