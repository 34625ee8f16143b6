"""Cases about datasets: the rows of each replica at each step, the end of the data, epochs, options.

No step runs here: ``looping.py`` has loops with steps.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

ON = "S1 S2 S3 S4"
# Rows and batch size: full batches, a partial last one, less than a row for each replica, no rows.
SIZES = ["10/4", "9/4", "5/4", "14/8", "3/2", "5/8", "1/3", "0/2"]


def numbers(count: int, dtype: str = "int32") -> np.ndarray:
    return np.arange(count, dtype=dtype)


def rows_and_batch(size: str) -> tuple[int, int]:
    rows, batch = size.split("/")
    return int(rows), int(batch)


def steps(side: Side, distributed: Any, count: int | None = None) -> list[Any]:
    """The rows of each replica for each step, or the first ``count`` steps."""
    return [side.local(element) for element in itertools.islice(distributed, count)]


def batched(side: Side, size: str, drop_remainder: bool = False) -> Any:
    rows, batch = rows_and_batch(size)
    return side.dataset(numbers(rows)).batch(batch, drop_remainder=drop_remainder)


def distributed(side: Side, rows: Any, batch: int) -> Any:
    return side.strategy.experimental_distribute_dataset(side.dataset(rows).batch(batch))


# The split of a batch.


@case(63, on=ON, size=SIZES)
def batches(side: Side, size: str) -> Any:
    return steps(side, side.strategy.experimental_distribute_dataset(batched(side, size)))


@case(63, on=ON, size=["8/4", "10/4", "9/3", "5/8"])
def batches_dropping_remainder(side: Side, size: str) -> Any:
    return steps(side, side.strategy.experimental_distribute_dataset(batched(side, size, True)))


@case(65, on="S2 S3 S4", size=["10/4", "9/4", "14/8", "5/8"], policy=["OFF"])
@case(65, on="S2 S3", size=["10/4"], policy=["AUTO", "DATA", "FILE", "HINT"])
def batches_with_policy(side: Side, size: str, policy: str) -> Any:
    return steps(side, side.distribute(batched(side, size), policy))


@case(63, 65, on="S2 S3 S4", size=["10/4", "14/8", "5/8"], policy=["AUTO", "OFF"])
def rows_of_steps(side: Side, size: str, policy: str) -> Any:
    """The rows of all replicas together, which do not depend on the split of a batch."""
    given = steps(side, side.distribute(batched(side, size), policy))
    return [[int(row) for part in parts for row in np.asarray(part)] for parts in given]


@case(63, on="S1 S2 S3", size=["100/10", "10/4"], drop_remainder=[False, True])
def batches_of_range(side: Side, size: str, drop_remainder: bool) -> Any:
    rows, batch = rows_and_batch(size)
    dataset = side.range_dataset(rows).batch(batch, drop_remainder=drop_remainder)
    return steps(side, side.strategy.experimental_distribute_dataset(dataset))


@case(65, on="S2 S3", policy=["AUTO", "FILE", "DATA"])
def batches_of_files(side: Side, policy: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, first, last in (("a", 0, 4), ("b", 4, 7), ("c", 7, 10)):
            path = Path(folder, name)
            path.write_text("".join(f"{n}\n" for n in range(first, last)))
            files.append(str(path))
        return steps(side, side.distribute(side.line_dataset(files).batch(4), policy))


@case(63, on="C2")
def batches_on_central_storage(side: Side) -> Any:
    return steps(side, distributed(side, numbers(10), 4))


@case(63, on="S1 S2 S3")
def batches_of_varying_size(side: Side) -> Any:
    sizes = [6, 3, 1, 12]
    dataset = side.batch_dataset([numbers(size) for size in sizes])
    return steps(side, side.strategy.experimental_distribute_dataset(dataset))


@case(63, on="S1 S2")
def arrays_with_different_numbers_of_rows(side: Side) -> Any:
    dataset = side.batch_dataset([(numbers(4), numbers(2))])
    return attempt(lambda: steps(side, side.strategy.experimental_distribute_dataset(dataset)))


@case(63)
def rows_that_are_vectors(side: Side) -> Any:
    rows = numbers(10, "float32").reshape(5, 2)
    return steps(side, distributed(side, rows, 4))


@case(63)
def batch_of_size_one(side: Side) -> Any:
    return steps(side, distributed(side, numbers(2), 1))


@case(24, on="S1 S2")
def nested_elements(side: Side) -> Any:
    rows = {"a": numbers(5), "b": (numbers(5, "float32"), numbers(10).reshape(5, 2))}
    return steps(side, distributed(side, rows, 4))


@case(63)
def dtypes(side: Side) -> Any:
    rows = tuple(numbers(4).astype(dtype) for dtype in ("uint8", "bool", "float16", "int16", "float32"))
    return steps(side, distributed(side, rows, 4))


# Invalid datasets.


@case(63, what=["numbers", "number_beside_batch"])
def unbatched(side: Side, what: str) -> Any:
    dataset = (
        side.dataset(numbers(4))
        if what == "numbers"
        else side.batch_dataset([(numbers(4), np.asarray(1, np.int32))])
    )
    return attempt(lambda: steps(side, side.strategy.experimental_distribute_dataset(dataset)))


@case(63, on="S1")
def unbatched_on_one_device(side: Side) -> Any:
    dataset = side.dataset(numbers(3))
    return attempt(lambda: steps(side, side.strategy.experimental_distribute_dataset(dataset)))


@case(63)
def unbatched_vectors(side: Side) -> Any:
    dataset = side.dataset(numbers(8).reshape(2, 4))
    return attempt(lambda: steps(side, side.strategy.experimental_distribute_dataset(dataset)))


@case(63, what=["none", "number", "text"])
def no_dataset(side: Side, what: str) -> Any:
    value = {"none": None, "number": 3, "text": "text"}[what]
    return attempt(lambda: steps(side, side.strategy.experimental_distribute_dataset(value)))


# Per-replica batches, from a function.


@case(61, on="S1 S2 S3", size=["9/2", "1/2", "0/2"], drop_remainder=[False, True])
def from_function(side: Side, size: str, drop_remainder: bool) -> Any:
    return steps(
        side,
        side.strategy.distribute_datasets_from_function(lambda context: batched(side, size, drop_remainder)),
    )


@case(61)
def from_function_of_range(side: Side) -> Any:
    return steps(
        side, side.strategy.distribute_datasets_from_function(lambda context: side.range_dataset(9).batch(2))
    )


@case(61, on="S1 S2 S3", rows=[3, 4])
def from_function_unbatched(side: Side, rows: int) -> Any:
    return steps(
        side, side.strategy.distribute_datasets_from_function(lambda context: side.dataset(numbers(rows)))
    )


@case(61, on="S1 S2")
def from_function_nested(side: Side) -> Any:
    rows = {"a": numbers(5), "b": (numbers(10, "float32").reshape(5, 2),)}
    return steps(
        side, side.strategy.distribute_datasets_from_function(lambda context: side.dataset(rows).batch(2))
    )


@case(61, on="S2 S3")
def from_function_sharded(side: Side) -> Any:
    def dataset_fn(context: Any) -> Any:
        size = context.get_per_replica_batch_size(6)
        dataset = side.dataset(numbers(12))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    return steps(side, side.strategy.distribute_datasets_from_function(dataset_fn))


@case(61, on="S1 S2 S3 C2")
def input_context(side: Side) -> Any:
    seen = []

    def dataset_fn(context: Any) -> Any:
        seen.append(
            [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
            + [attempt(lambda size=size: context.get_per_replica_batch_size(size)) for size in (12, 13)]
        )
        return side.dataset(numbers(4)).batch(2)

    side.strategy.distribute_datasets_from_function(dataset_fn)
    return seen


@case(61)
def input_context_with_wrong_batch_size(side: Side) -> Any:
    def dataset_fn(context: Any) -> Any:
        return side.dataset(numbers(4)).batch(context.get_per_replica_batch_size(7))

    return attempt(lambda: side.strategy.distribute_datasets_from_function(dataset_fn))


def options_for(side: Side, chosen: str) -> Any:
    mode = side.dist.InputReplicationMode
    given = {
        "host": {"experimental_fetch_to_device": False},
        "per_worker": {"experimental_replication_mode": mode.PER_WORKER},
        "per_replica": {"experimental_replication_mode": mode.PER_REPLICA},
        "buffer": {"experimental_per_replica_buffer_size": 3},
        "no_buffer": {"experimental_per_replica_buffer_size": 0},
        "place": {"experimental_place_dataset_on_device": True},
        "place_per_replica": {
            "experimental_place_dataset_on_device": True,
            "experimental_replication_mode": mode.PER_REPLICA,
        },
        "place_per_replica_host": {
            "experimental_place_dataset_on_device": True,
            "experimental_replication_mode": mode.PER_REPLICA,
            "experimental_fetch_to_device": False,
        },
    }
    return side.dist.InputOptions(**given[chosen])


OPTIONS = ["host", "per_worker", "buffer", "per_replica", "place_per_replica_host"]
WRONG_OPTIONS = ["place", "place_per_replica", "no_buffer"]

# In separate processes: in TensorFlow a strategy that was asked for PER_REPLICA once stays so.


@case(61, on="S1 S3 C2", alone=True, chosen=["per_replica"])
@case(61, alone=True, chosen=OPTIONS + WRONG_OPTIONS)
def from_function_with_options(side: Side, chosen: str) -> Any:
    """Each pipeline has its own number of rows."""
    contexts = []

    def dataset_fn(context: Any) -> Any:
        contexts.append([context.num_input_pipelines, context.input_pipeline_id])
        return side.dataset(numbers(5)[context.input_pipeline_id :]).batch(2)

    given = attempt(
        lambda: steps(
            side, side.strategy.distribute_datasets_from_function(dataset_fn, options_for(side, chosen))
        )
    )
    return {"contexts": contexts, "given": given}


@case(63, alone=True, chosen=OPTIONS + WRONG_OPTIONS)
def batches_with_options(side: Side, chosen: str) -> Any:
    return attempt(
        lambda: steps(side, side.distribute(batched(side, "10/4"), "AUTO", options_for(side, chosen)))
    )


# The end.


@case(67, on="S1 S2 S3")
def optional_end(side: Side) -> Any:
    iterator = iter(distributed(side, numbers(3), 2))
    seen = []
    for _ in range(3):
        optional = iterator.get_next_as_optional()
        has_value = bool(optional.has_value())
        seen.append([has_value, side.local(optional.get_value()) if has_value else None])
    return {"seen": seen, "next": attempt(lambda: next(iterator))}


@case(67, on="S1 S2")
def optional_without_value(side: Side) -> Any:
    iterator = iter(distributed(side, numbers(0), 2))
    optional = iterator.get_next_as_optional()
    return {"has_value": bool(optional.has_value()), "value": attempt(optional.get_value)}


@case(59, on="S1 S2", how=["get_next", "next"])
def after_the_end(side: Side, how: str) -> Any:
    iterator = iter(distributed(side, numbers(3), 2))
    take = iterator.get_next if how == "get_next" else lambda: next(iterator)
    return [side.local(take()), side.local(take()), attempt(take), attempt(take)]


@case(67, on="S1 S2 S3")
def optional_end_from_function(side: Side) -> Any:
    dataset = side.strategy.distribute_datasets_from_function(lambda context: batched(side, "5/2"))
    iterator = iter(dataset)
    seen = []
    while (optional := iterator.get_next_as_optional()).has_value():
        seen.append(side.local(optional.get_value()))
    return seen


@case(0, on="S2 S3", repeated=["batches", "rows"])
def without_end(side: Side, repeated: str) -> Any:
    rows = side.dataset(numbers(5))
    dataset = rows.batch(3).repeat() if repeated == "batches" else rows.repeat().batch(3)
    return steps(side, side.strategy.experimental_distribute_dataset(dataset), 4)


@case(0, repeated=["batches", "rows"])
def repeated_twice(side: Side, repeated: str) -> Any:
    rows = side.dataset(numbers(5))
    dataset = rows.batch(2).repeat(2) if repeated == "batches" else rows.repeat(2).batch(2)
    return steps(side, side.strategy.experimental_distribute_dataset(dataset))


@case(0, taken=["batches", "rows"])
def taken(side: Side, taken: str) -> Any:
    rows = side.dataset(numbers(9))
    dataset = rows.batch(2).take(3) if taken == "batches" else rows.take(3).batch(2)
    return steps(side, side.strategy.experimental_distribute_dataset(dataset))


@case(61, on="S1 S2")
def from_function_without_end(side: Side) -> Any:
    dataset = side.strategy.distribute_datasets_from_function(lambda context: batched(side, "3/2").repeat())
    return steps(side, dataset, 3)


@case(0, on="S1 S2")
def without_end_as_optional(side: Side) -> Any:
    iterator = iter(side.strategy.experimental_distribute_dataset(batched(side, "4/4").repeat()))
    return [bool(iterator.get_next_as_optional().has_value()) for _ in range(3)]


# The dataset and its iterators.


@case(68, on="S1 S2 S3", batch=[4, 3], drop_remainder=[False, True])
def element_spec(side: Side, batch: int, drop_remainder: bool) -> Any:
    dataset = side.dataset(numbers(12)).batch(batch, drop_remainder=drop_remainder)
    return side.replica_specs(side.strategy.experimental_distribute_dataset(dataset))


@case(68, on="S1 S2")
def element_spec_of_nest(side: Side) -> Any:
    rows = {"a": numbers(4), "b": (numbers(4, "float32"), numbers(24).reshape(4, 3, 2))}
    return side.replica_specs(distributed(side, rows, 2))


@case(68, on="S1 S2", drop_remainder=[False, True])
def element_spec_from_function(side: Side, drop_remainder: bool) -> Any:
    return side.replica_specs(
        side.strategy.distribute_datasets_from_function(lambda context: batched(side, "12/4", drop_remainder))
    )


@case(68, on="S1 S2")
def element_spec_from_function_unbatched(side: Side) -> Any:
    return side.replica_specs(
        side.strategy.distribute_datasets_from_function(lambda context: side.dataset(numbers(4)))
    )


@case(68)
def element_spec_of_empty_dataset(side: Side) -> Any:
    return side.replica_specs(distributed(side, numbers(0), 2))


@case(68)
def element_spec_of_iterator(side: Side) -> Any:
    dataset = side.strategy.experimental_distribute_dataset(batched(side, "8/4", True))
    return side.replica_specs(iter(dataset))


@case(69, on="S1 S2")
def epochs(side: Side) -> Any:
    dataset = distributed(side, numbers(5), 4)
    return [steps(side, dataset) for _ in range(3)]


@case(69, on="S1 S2", order=["new", "kept", "cached"])
def shuffled_epochs(side: Side, order: str) -> Any:
    dataset = side.shuffled(side.dataset(numbers(64)), order).batch(16)
    dataset = side.strategy.experimental_distribute_dataset(dataset)
    first, second = (
        [int(row) for parts in steps(side, dataset) for part in parts for row in np.asarray(part)]
        for _ in range(2)
    )
    return {
        "equal": first == second,
        "in_order": first == sorted(first),
        "all_rows": sorted(first) == sorted(second) == list(range(64)),
    }


@case(69)
def left_and_begun_again(side: Side) -> Any:
    dataset = distributed(side, numbers(8), 2)
    return [steps(side, dataset, count) for count in (1, 2, None)]


@case(69)
def rest_of_an_iterator(side: Side) -> Any:
    iterator = iter(distributed(side, numbers(8), 2))
    first = side.local(next(iterator))
    return [first, steps(side, iterator)]


@case(69)
def two_iterators_of_one_dataset(side: Side) -> Any:
    dataset = distributed(side, numbers(6), 2)
    first, second = iter(dataset), iter(dataset)
    return [side.local(next(each)) for each in (first, first, second, first, second)]


@case(69)
def two_distributed_from_one_dataset(side: Side) -> Any:
    dataset = batched(side, "4/2")
    make = side.strategy.experimental_distribute_dataset
    return [
        [side.local(one), side.local(other)] for one, other in zip(make(dataset), make(dataset), strict=True)
    ]


@case(69)
def iterated_with_enumerate(side: Side) -> Any:
    return [[number, side.local(x)] for number, x in enumerate(distributed(side, numbers(5), 2))]


@case(0, on="S1 S2")
def kinds(side: Side) -> Any:
    dataset = distributed(side, numbers(4), 2)
    iterator = iter(dataset)
    return {
        "dataset": isinstance(dataset, side.dist.DistributedDataset),
        "iterator": isinstance(iterator, side.dist.DistributedIterator),
        "its_own_iterator": iter(iterator) is iterator,
        "no_transformations": attempt(lambda: dataset.map(lambda x: x)),
        "value": isinstance(next(iterator), side.dist.DistributedValues),
    }


@case(0)
def in_scope(side: Side) -> Any:
    with side.strategy.scope():
        return steps(side, distributed(side, numbers(5), 2))


@case(0, how=["next", "get_next", "iterate"])
def in_replica(side: Side, how: str) -> Any:
    dataset = distributed(side, numbers(4), 2)
    iterator = iter(dataset)
    fn = {"next": lambda: next(iterator), "get_next": iterator.get_next, "iterate": lambda: list(dataset)}[
        how
    ]
    return attempt(lambda: side.strategy.run(lambda: fn()))


@case(0, on="S1 S2")
def made_from_numpy(side: Side) -> Any:
    rows = (numbers(5), numbers(10, "float32").reshape(5, 2))
    return steps(side, side.strategy.experimental_distribute_dataset(side.numpy_dataset(rows).batch(2)))


@case(0, on="S1 S2")
def dataset_reduce(side: Side) -> Any:
    dataset = distributed(side, numbers(7, "float32"), 4)

    def reduce_fn(state: Any, x: Any) -> Any:
        return state + side.strategy.reduce("SUM", x, axis=0)

    return dataset.reduce(side.array(100.0), reduce_fn)


@case(0)
def empty_dataset_reduce(side: Side) -> Any:
    dataset = distributed(side, numbers(0, "float32"), 4)
    return dataset.reduce(side.array(100.0), lambda state, x: state + side.strategy.reduce("SUM", x, axis=0))


@case(0, on="S2 S3", op=["SUM", "MEAN"], size=["10/4", "7/3"])
def reduced_batches(side: Side, op: str, size: str) -> Any:
    """These do not depend on the split of a batch."""
    rows, batch = rows_and_batch(size)
    dataset = distributed(side, numbers(rows, "float32"), batch)
    return [side.strategy.reduce(op, x, axis=0) for x in dataset]


@case(0, on="S2 S3")
def gathered_batches(side: Side) -> Any:
    dataset = distributed(side, numbers(7, "float32"), 5)
    return [side.strategy.gather(x, axis=0) for x in dataset]
