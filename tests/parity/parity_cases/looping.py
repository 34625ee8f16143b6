"""Cases about loops over distributed datasets: the results of ``run`` and ``reduce`` over all of the data."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parity_cases.feeding import distributed, numbers, rows_and_batch
from parity_cases.observing import Raised, attempt
from parity_cases.registry import case
from parity_cases.side import Side


def flattened(side: Side, value: Any) -> list[float]:
    return [float(row) for part in side.local(value) for row in np.asarray(part)]


def square(x: Any) -> Any:
    return x * x


def runner(side: Side, replica_fn: Callable[[Any], Any], where: str) -> Callable[[Any], Any]:
    """``strategy.run`` of a function: plain, as a function of the framework, or inside one."""
    strategy = side.strategy
    if where == "replica_function":
        return lambda x: strategy.run(side.function(replica_fn), args=(x,))
    if where == "step_function":
        return side.function(lambda x: strategy.run(replica_fn, args=(x,)))
    return lambda x: strategy.run(replica_fn, args=(x,))


WHERE = ["eager", "replica_function", "step_function"]


@case(54, on="S1 S2 S3 C2", where=WHERE)
def loop_square(side: Side, where: str) -> Any:
    run = runner(side, square, where)
    rows = numbers(4, "float32") + np.float32(5)
    return [flattened(side, run(x)) for x in distributed(side, rows, 2)]


@case(56, on="S1 S2 S3 S4 C2")
def partial_last(side: Side) -> Any:
    run = runner(side, square, "eager")
    rows = numbers(3, "float32") + np.float32(5)
    return [flattened(side, run(x)) for x in distributed(side, rows, 2)]


@case(24, on="S1 S2")
def nested_output(side: Side) -> Any:
    def replica_fn(x: Any) -> Any:
        return [{"a": x - 1, "b": x + 1}]

    return [side.local(side.strategy.run(replica_fn, args=(x,))) for x in distributed(side, numbers(4), 2)]


@case(55, on="S1 S2 S3")
def loop_reduce_mean(side: Side) -> Any:
    rows = numbers(4, "float32") + np.float32(5)
    dataset = distributed(side, rows, 2)
    v = side.variable(1.0, agg="ONLY_FIRST_REPLICA")
    count, product = 0, 2.0
    for x in dataset:
        count += 1
        mean = side.strategy.reduce("MEAN", side.strategy.run(lambda x: x + 0.0, args=(x,)), axis=0)
        product = product * mean
    for _ in dataset:
        side.strategy.run(lambda: v.assign_add(1.0) + 0.0)
    return {"steps": count, "product": product, "v": side.read(v)}


@case(55, 60, on="S1 S2 C2")
def loop_in_function(side: Side) -> Any:
    dataset = distributed(side, numbers(10, "float32") ** 2, 4)
    v = side.variable(0.0, agg="SUM")

    @side.function
    def epoch() -> Any:
        for x in dataset:
            side.strategy.run(lambda x: v.assign_add(side.sum(x)) + 0.0, args=(x,))

    seen = []
    for _ in range(2):
        epoch()
        seen.append(side.read(v))
    return seen


@case(55, on="S1 S2", iterator=["argument", "closure"])
def next_in_function(side: Side, iterator: str) -> Any:
    elements = iter(distributed(side, numbers(7, "float32"), 4))

    def step(given: Any) -> Any:
        sums = side.strategy.run(side.sum, args=(next(given),))
        return side.strategy.reduce("SUM", sums, axis=None)

    if iterator == "argument":
        function = side.function(step)
        return [function(elements) for _ in range(2)]
    function = side.function(lambda: step(elements))
    return [function() for _ in range(2)]


@case(59, on="S1 S2 S3")
def out_of_range(side: Side) -> Any:
    iterator = iter(distributed(side, numbers(4, "float32") + np.float32(5), 2))
    v = side.variable(0.0, agg="SUM")
    count = 0
    while not isinstance(x := attempt(iterator.get_next), Raised):
        side.strategy.run(lambda x: v.assign_add(side.sum(x)) + 0.0, args=(x,))
        count += 1
    return {"steps": count, "v": side.read(v), "end": x}


@case(60, on="S1 S2 S3 S4 C2")
def sum_squares(side: Side) -> Any:
    v = side.variable(0.0, agg="SUM")
    for x in distributed(side, numbers(10, "float32") ** 2, 4):
        side.strategy.run(lambda x: v.assign_add(side.sum(x)) + 0.0, args=(x,))
    return side.read(v)


@case(60, on="S3", policy=["AUTO", "OFF"], size=["14/8", "5/8"])
def sums_of_replicas(side: Side, policy: str, size: str) -> Any:
    """The values reduced after ``run`` do not depend on the split of a batch."""
    rows, batch = rows_and_batch(size)
    dataset = side.distribute(side.dataset(numbers(rows, "float32")).batch(batch), policy)

    @side.function
    def step(x: Any) -> Any:
        sums = side.strategy.run(side.sum, args=(x,))
        return side.strategy.reduce("SUM", sums, axis=None)

    return [step(x) for x in dataset]


@case(61, on="S1 S2 S3")
def loop_from_function(side: Side) -> Any:
    dataset = side.strategy.distribute_datasets_from_function(
        lambda context: side.dataset(numbers(9, "float32")).batch(2)
    )

    def replica_fn(x: Any) -> Any:
        return side.sum(x * x)

    return [side.local(side.strategy.run(replica_fn, args=(x,))) for x in dataset]


def features_and_labels(count: int) -> Sequence[np.ndarray]:
    x = numbers(count, "float32")
    return x.reshape(count, 1), 2 * x + 1


@case(55, on="S1 S2 S3", size=["10/4", "5/3"])
def average_loss(side: Side, size: str) -> Any:
    """A loss over the global batch, without a gradient."""
    rows, batch = rows_and_batch(size)
    dataset = distributed(side, features_and_labels(rows), batch)

    def replica_fn(element: Any) -> Any:
        features, labels = element
        errors = square(side.mean_of_rows(features) * 1.5 - labels)
        return side.nn.compute_average_loss(errors, global_batch_size=batch)

    losses = [side.strategy.run(replica_fn, args=(element,)) for element in dataset]
    return [side.strategy.reduce("SUM", loss, axis=None) for loss in losses]
