"""Cases about ``Strategy.reduce``, ``reduce_to`` and ``Strategy.gather``."""

from typing import Any

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

OPS = ["SUM", "MEAN"]
AXES = [None, 0, 1, (0, 1), -1]
EVEN = [[[0.0, 1.0], [2.0, 5.0]], [[4.0, 6.0], [7.0, 9.0]], [[1.0, 3.0], [8.0, 2.0]]]
RAGGED = {
    "S2": [[[0.0, 1.0], [2.0, 5.0]], [[4.0, 6.0]]],
    "S3": [[[0.0, 1.0], [2.0, 5.0]], [[4.0, 6.0], [3.0, 8.0]], [[4.0, 6.0]]],
    "C2": [[[0.0, 1.0], [2.0, 5.0]], [[4.0, 6.0]]],
}


@case(10, on="D S1", op=["mean", "MEAN", "sum", "SUM", "Mean"])
def op_as_text(side: Side, op: str) -> Any:
    return side.strategy.reduce(op, side.array(1.0), axis=None)


@case(11, on="D S1", op=OPS, axis=AXES)
def one_replica(side: Side, op: str, axis: Any) -> Any:
    return side.strategy.reduce(op, side.array([[1.0, 2.0], [3.0, 4.0]]), axis=axis)


@case(12, on="S2 C2", op=OPS, axis=[None, 0])
def doc_example(side: Side, op: str, axis: Any) -> Any:
    x = side.per_replica([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    return side.strategy.reduce(op, x, axis=axis)


@case(12, on="S2 S3 C2", op=OPS, axis=AXES)
def even(side: Side, op: str, axis: Any) -> Any:
    x = side.per_replica(EVEN[: side.num_replicas])
    return side.strategy.reduce(op, x, axis=axis)


@case(12, on="S2 S3 C2", op=OPS, axis=[None, 0, 1, (0, 1), -1])
def ragged(side: Side, op: str, axis: Any) -> Any:
    x = side.per_replica(RAGGED[side.on])
    return attempt(lambda: side.strategy.reduce(op, x, axis=axis))


@case(12, op=OPS, axis=[None, 0])
def ragged_vector(side: Side, op: str, axis: Any) -> Any:
    x = side.per_replica([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]])
    return attempt(lambda: side.strategy.reduce(op, x, axis=axis))


@case(12, op=OPS, empty=["one", "all"])
def empty_replicas(side: Side, op: str, empty: str) -> Any:
    x = side.per_replica([[1.0, 2.0] if empty == "one" else [], []])
    return side.strategy.reduce(op, x, axis=0)


@case(12, on="S2 C2", op=OPS, axis=[None, 0])
def after_run(side: Side, op: str, axis: Any) -> Any:
    x = side.per_replica([[0.0, 1.0], [4.0, 5.0]])
    out = side.strategy.run(lambda x: x * 2.0, args=(x,))
    return side.strategy.reduce(op, out, axis=axis)


@case(14, on="S2 S3 S4 C2", op=OPS, dtype=["float32", "int32"])
def triangle(side: Side, op: str, dtype: str) -> Any:
    """Replica r has r + 1 times the number r."""
    x = side.per_replica([[r] * (r + 1) for r in range(side.num_replicas)], dtype)
    out = side.strategy.run(lambda x: x + x, args=(x,))
    return side.strategy.reduce(op, out, axis=0)


@case(12, on="S1 S2", axis=[None, 0])
def int_mean(side: Side, axis: Any) -> Any:
    x = side.per_replica([[1, 2], [4, 6]][: side.num_replicas], "int32")
    return side.strategy.reduce("MEAN", x, axis=axis)


@case(12)
def int_sum(side: Side) -> Any:
    x = side.per_replica([[1, 2], [4, 6]], "int32")
    return side.strategy.reduce("SUM", x, axis=None)


@case(12, how=["member", "text"])
def op_as_member(side: Side, how: str) -> Any:
    x = side.per_replica([1.0, 2.0])
    op = side.dist.ReduceOp.SUM if how == "member" else "sum"
    return side.strategy.reduce(op, x, axis=None)


@case(17, on="S2 S3 C2", op=OPS)
def plain_scalar(side: Side, op: str) -> Any:
    return attempt(lambda: side.strategy.reduce(op, side.array(3.0), axis=None))


@case(17, on="S2 C2", op=OPS)
def plain_array_over_axis(side: Side, op: str) -> Any:
    return attempt(lambda: side.strategy.reduce(op, side.array([1.0, 2.0]), axis=0))


@case(17, op=OPS, value=[0, 1, 1.5])
def plain_number(side: Side, op: str, value: float) -> Any:
    return attempt(lambda: side.strategy.reduce(op, value, axis=None))


@case(17, on="S2 C2", op=OPS)
def variable(side: Side, op: str) -> Any:
    v = side.variable([1.0, 2.0])
    return attempt(lambda: side.strategy.reduce(op, v, axis=None))


@case(17, op=OPS)
def on_read_variable(side: Side, op: str) -> Any:
    v = side.variable(0.0, "ON_READ", "SUM")
    side.strategy.run(lambda: v.assign(side.replica_id() + 1.0) + 0.0)
    return attempt(lambda: side.strategy.reduce(op, v, axis=None))


@case(18, on="S1 S2 C2")
def in_replica(side: Side) -> Any:
    def replica_fn() -> Any:
        return side.strategy.reduce("SUM", side.array(1.0), axis=None)

    return attempt(lambda: side.strategy.run(replica_fn))


@case(0, wrong=["axis_too_large", "axis_too_small", "axis_float", "op_text", "op_number"])
def wrong_arguments(side: Side, wrong: str) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    op = {"op_text": "MAX", "op_number": 3}.get(wrong, "SUM")
    axis = {"axis_too_large": 1, "axis_too_small": -2, "axis_float": 0.5}.get(wrong)
    return attempt(lambda: side.strategy.reduce(op, x, axis=axis))


@case(0, on="S1 S2 S3 C2", op=OPS)
def structure(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        return {"a": r + 1.0, "b": [r + 2.0, r * 10.0]}

    out = side.strategy.run(replica_fn)
    return attempt(lambda: side.strategy.reduce(op, out, axis=None))


@case(0, op=OPS)
def structure_over_axis(side: Side, op: str) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    return attempt(lambda: side.strategy.reduce(op, {"a": x, "b": x}, axis=0))


@case(0, on="S2 C2", op=OPS)
def reduce_to_variables_place(side: Side, op: str) -> Any:
    v = side.variable(0.0)
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    with side.strategy.scope():
        out = side.strategy.extended.reduce_to(op, x, destinations=v)
        return side.read(side.local(out)[0])


@case(0, on="S2 C2", op=OPS)
def reduce_to_device(side: Side, op: str) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    with side.strategy.scope():
        out = side.strategy.extended.reduce_to(op, x, destinations=side.device(0))
        return side.read(side.local(out)[0])


@case(0)
def batch_reduce_to(side: Side) -> Any:
    v = side.variable(0.0)
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    y = side.per_replica([5.0, 6.0])
    with side.strategy.scope():
        out = side.strategy.extended.batch_reduce_to("SUM", [(x, v), (y, v)])
        return [side.read(side.local(each)[0]) for each in out]


# gather


@case(51, on="S1 S2 S3 C2", axis=[0, -1])
def gather_vector(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        return side.array([1.0, 2.0, 3.0]) * (side.replica_id() + 1.0)

    return attempt(lambda: side.strategy.gather(side.strategy.run(replica_fn), axis=axis))


@case(51, on="S1 S2 S3", axis=[0, 1, -1, -2])
def gather_matrix(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        return side.array([[1.0, 2.0, 3.0]]) * (side.replica_id() + 1.0)

    return attempt(lambda: side.strategy.gather(side.strategy.run(replica_fn), axis=axis))


@case(51, on="S2 C2", axis=[0, 1, 2])
def gather_cube(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        return side.array([[[1.0, 2.0], [3.0, 4.0]]]) * (side.replica_id() + 1.0)

    return side.strategy.gather(side.strategy.run(replica_fn), axis=axis)


@case(51, on="S2 S3 C2", axis=[0, 1])
def gather_ragged(side: Side, axis: int) -> Any:
    rows = range(1, side.num_replicas + 1)
    values = [[[float(n)]] * n if axis == 0 else [[float(n)] * n] for n in rows]
    return side.strategy.gather(side.per_replica(values), axis=axis)


@case(51)
def gather_empty_replica(side: Side) -> Any:
    return side.strategy.gather(side.per_replica([[1.0, 2.0], []]), axis=0)


@case(51, on="D S1 S2")
def gather_plain_array(side: Side) -> Any:
    return side.strategy.gather(side.array([1.0, 2.0]), axis=0)


@case(51)
def gather_ints(side: Side) -> Any:
    return side.strategy.gather(side.per_replica([[1, 2], [3, 4]], "int32"), axis=0)


@case(51)
def gather_structure(side: Side) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    return attempt(lambda: side.strategy.gather({"a": x}, axis=0))


@case(53, alone=True, what=["dimension", "rank", "scalar", "axis"])
def gather_wrong(side: Side, what: str) -> Any:
    values = {
        "dimension": [[[1.0, 2.0]], [[1.0]]],
        "rank": [[[1.0, 2.0]], [1.0, 2.0]],
        "scalar": [1.0, 2.0],
        "axis": [[1.0], [2.0]],
    }[what]
    axis = 2 if what == "axis" else 0
    return attempt(lambda: side.strategy.gather(side.per_replica(values), axis=axis))


@case(53, alone=True)
def gather_indexed_slices(side: Side) -> Any:
    def slices() -> Any:
        return side.indexed_slices(side.array([[1.0]]), [0], [5, 1])

    return attempt(lambda: side.strategy.gather(side.strategy.run(slices), axis=0))


@case(53, on="S1 S2 C2")
def gather_in_replica(side: Side) -> Any:
    def replica_fn() -> Any:
        return side.strategy.gather(side.array([1.0]), axis=0)

    return attempt(lambda: side.strategy.run(replica_fn))
