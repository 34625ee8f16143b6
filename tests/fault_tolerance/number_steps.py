"""A training of NumPy arrays as ``SteppedProgram``s, and the numbers of the run that nothing disturbs."""

import numpy as np

from replicax._src.fault_tolerance.first_step import StepDigests, digests_of

LENGTH = 1000
ROWS = 96


class Training:
    """The state of one process. Each step has two rounds: a maximum, and two sums that depend on it."""

    def __init__(self, length=LENGTH, point=lambda name: None):
        self.weights = np.zeros(length, np.float32)
        self.count = 0
        self.point = point

    def step(self):
        return Step(self, self.count)


class Step:
    reductions = (("max",), ("sum", "sum"))
    num_rows = ROWS
    program = "a step"

    def __init__(self, training, number):
        self.training, self.number = training, number

    def digests(self):
        weights, count = self.training.weights, np.int64(self.number)
        state = digests_of(["weights", "count"], [weights, np.int64(self.training.count)])
        return StepDigests(self.program, state, digests_of(["rows"], [count]))

    def sums(self, replicas, combine):
        point, weights = self.training.point, self.training.weights
        point(f"begin {self.number}")
        rows = [rows_of(self.number, replica, len(weights)) for replica in replicas]
        point(f"before 0 of {self.number}")
        largest = combine(0, [[np.abs(each[:3])] for each in rows])
        point(f"between 0 and 1 of {self.number}")
        parts = [
            [weights * np.float32(0.01) + each / (1 + largest[0].sum()), np.array([len(weights)], np.int32)]
            for each in rows
        ]
        summed = combine(1, parts)
        point(f"after 1 of {self.number}")
        return [largest, summed]

    def update(self, sums):
        self.training.point(f"before update {self.number}")
        (largest,), (total, count) = sums
        self.training.weights = self.training.weights - total * np.float32(0.1) + largest.max()
        self.training.count += 1
        self.training.point(f"after update {self.number}")
        return float(count[0])


def rows_of(number, replica, length):
    return np.random.default_rng([number, replica]).standard_normal(length, np.float32)


def undisturbed(num_replicas, num_steps, length=LENGTH):
    """The weights after a run of one process that computes all replicas."""
    training = Training(length)

    def combine(round_index, parts):
        totals = []
        for at, reduction in enumerate(Step.reductions[round_index]):
            total = parts[0][at]
            for part in parts[1:]:
                total = np.maximum(total, part[at]) if reduction == "max" else total + part[at]
            totals.append(total)
        return totals

    for _ in range(num_steps):
        step = training.step()
        step.update(step.sums(range(num_replicas), combine))
    return training.weights
