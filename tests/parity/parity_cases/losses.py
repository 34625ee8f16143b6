"""Cases about ``nn.compute_average_loss`` and ``nn.scale_regularization_loss``."""

from typing import Any

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

LOSSES = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
WEIGHTS = [[1.0, 0.5], [2.0, 0.0], [1.0, 3.0]]


def average(side: Side, values: Any, **options: Any) -> Any:
    x = side.per_replica(values[: side.num_replicas])
    return side.strategy.run(lambda x: side.nn.compute_average_loss(x, **options), args=(x,))


@case(95, on="S1 S2 S3 C2", size=[None, 4, 10])
def average_loss(side: Side, size: int | None) -> Any:
    return average(side, LOSSES, global_batch_size=size)


@case(95, on="S1 S2", size=[None, 10])
def average_loss_weighted(side: Side, size: int | None) -> Any:
    count = side.num_replicas
    x, w = side.per_replica(LOSSES[:count]), side.per_replica(WEIGHTS[:count])

    def replica_fn(x: Any, w: Any) -> Any:
        return side.nn.compute_average_loss(x, sample_weight=w, global_batch_size=size)

    return side.strategy.run(replica_fn, args=(x, w))


@case(95)
def average_loss_of_rank_two(side: Side) -> Any:
    return average(side, [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])


@case(95)
def average_loss_weighted_of_rank_two(side: Side) -> Any:
    x = side.per_replica([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])

    def replica_fn(x: Any) -> Any:
        return side.nn.compute_average_loss(x, sample_weight=side.array([1.0, 2.0]))

    return side.strategy.run(replica_fn, args=(x,))


@case(95)
def average_loss_of_ints(side: Side) -> Any:
    x = side.per_replica([[1, 2], [3, 5]], "int32")
    return attempt(lambda: side.strategy.run(lambda x: side.nn.compute_average_loss(x), args=(x,)))


@case(95, size=[None, 5])
def average_loss_uneven(side: Side, size: int | None) -> Any:
    return average(side, [[1.0, 2.0, 3.0], [4.0, 5.0]], global_batch_size=size)


@case(95, size=[None, 3])
def average_loss_empty_replica(side: Side, size: int | None) -> Any:
    return average(side, [[1.0, 2.0, 3.0], []], global_batch_size=size)


@case(95, on="S1 S2", size=[None, 4])
def average_loss_all_empty(side: Side, size: int | None) -> Any:
    return average(side, [[], []], global_batch_size=size)


@case(95)
def average_loss_size_zero(side: Side) -> Any:
    return average(side, LOSSES, global_batch_size=0)


@case(95, on="S1 S2")
def average_loss_scalar(side: Side) -> Any:
    return attempt(lambda: average(side, [1.0, 2.0]))


@case(95, on="S2", size=[None, 4])
def average_loss_in_scope(side: Side, size: int | None) -> Any:
    with side.strategy.scope():
        return attempt(lambda: side.nn.compute_average_loss(side.array([1.0, 2.0]), global_batch_size=size))


@case(95, on="D", size=[None, 4])
def average_loss_by_default(side: Side, size: int | None) -> Any:
    return side.nn.compute_average_loss(side.array([1.0, 2.0]), global_batch_size=size)


@case(95, wrong=["float", "negative", "vector"])
def average_loss_wrong_size(side: Side, wrong: str) -> Any:
    size = {"float": 4.0, "negative": -4, "vector": [4]}[wrong]
    return attempt(lambda: average(side, LOSSES, global_batch_size=size))


@case(95, on="S1 S2 S3 C2", value=["vector", "scalar"])
def regularization_loss(side: Side, value: str) -> Any:
    x = side.array([2.0, 4.0] if value == "vector" else 6.0)
    return side.local(side.strategy.run(lambda: side.nn.scale_regularization_loss(x)))


@case(95)
def regularization_loss_of_list(side: Side) -> Any:
    def replica_fn() -> Any:
        return side.nn.scale_regularization_loss([side.array(2.0), side.array(4.0)])

    return side.local(side.strategy.run(replica_fn))


@case(95)
def regularization_loss_in_scope(side: Side) -> Any:
    with side.strategy.scope():
        return attempt(lambda: side.nn.scale_regularization_loss(side.array([2.0, 4.0])))


@case(95, on="D")
def regularization_loss_by_default(side: Side) -> Any:
    return side.nn.scale_regularization_loss(side.array([2.0, 4.0]))
