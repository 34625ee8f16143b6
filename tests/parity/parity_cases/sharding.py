"""Cases about partitioners, ``ShardedVariable`` and lookups of embeddings."""

import random
from typing import Any

import numpy as np

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

OPERATIONS = ["add", "sub", "mul", "div", "min", "max", "update"]
PARTS = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 10.0]]]
INDICES = {
    "first": 0,
    "last": -1,
    "number": 3,
    "numpy_number": np.int64(2),
    "behind": 5,
    "before": -6,
    "slice": slice(1, 4),
    "steps": slice(0, 5, 3),
    "reversed": slice(None, None, -1),
    "backwards": slice(4, 0, -2),
    "beyond": slice(20, None, -1),
    "from_before": slice(-10, 2),
    "nothing": slice(10, 20),
    "no_step": slice(None, None, 0),
    "column": (slice(1, 4), 0),
    "turned": (slice(1, 4), slice(None, None, -1)),
    "ellipsis": ...,
    "last_column": (..., -1),
    "some_columns": (..., slice(0, 1)),
    "new_dim": None,
    "new_dim_and_rows": (None, slice(1, 3)),
    "element": (3, 1),
    "row_and_new_dim": (0, None),
    "row_and_ellipsis": (1, ...),
    "behind_in_row": (0, 2),
    "too_many": (0, 0, 0),
    "mask_of_rows": np.array([True, False, True, False, True]),
    "mask": np.array([[True, False]] * 5),
    "mask_of_none": np.zeros(5, bool),
    "short_mask": np.array([True, False]),
    "true": True,
    "list": [0, 2],
    "array": np.array([0, 2]),
    "float": 1.5,
}


def make(side: Side, parts: Any = PARTS) -> Any:
    return side.ShardedVariable([side.Variable(part) for part in parts])


def after(variable: Any, call: Any) -> Any:
    """The result of the call, if it is not a variable, and the values after it."""
    out = attempt(call)
    return ["itself" if out is variable else out, variable.numpy()]


def partitioners(side: Side, kind: str, num_bytes: int, count: int, bytes_per_string: int) -> Any:
    of = side.dist.experimental.partitioners
    return {
        "fixed": lambda: of.FixedShardsPartitioner(count),
        "min": lambda: of.MinSizePartitioner(num_bytes, count, bytes_per_string),
        "max": lambda: of.MaxSizePartitioner(num_bytes, None, bytes_per_string),
        "max_and_count": lambda: of.MaxSizePartitioner(num_bytes, count, bytes_per_string),
    }[kind]()


@case(on="D", kind=["fixed", "min", "max", "max_and_count"])
def counts(side: Side, kind: str) -> Any:
    """Results for 200 random shapes, dtypes and sizes."""
    choose = random.Random(7)
    out = []
    for _ in range(200):
        shape = [choose.choice([1, 2, 3, 5, choose.randint(1, 40), choose.randint(1, 10**5)])]
        shape += [choose.randint(1, 40) for _ in range(choose.randint(0, 3))]
        dtype = choose.choice(["float32", "bfloat16", "float64", "int8", "bool", "complex128", "string"])
        num_bytes = choose.choice([1, 4, 7, 100, choose.randint(1, 10**4), 1 << 18, choose.randint(1, 10**8)])
        count = choose.choice([1, 2, 3, 10, choose.randint(1, 10**6)])
        partitioner = partitioners(side, kind, num_bytes, count, choose.choice([1, 4, 16, 33]))
        axis = choose.randrange(len(shape))
        out.append([int(n) for n in partitioner(side.tensor_shape(shape), dtype, axis)])
    return out


@case(on="D", kind=["min", "max_and_count"], num_bytes=[0, -1, 4], count=[0, -1, 4], bytes_per_string=[0, 16])
def arguments(side: Side, kind: str, num_bytes: int, count: int, bytes_per_string: int) -> Any:
    made = attempt(lambda: partitioners(side, kind, num_bytes, count, bytes_per_string))
    return attempt(lambda: made(side.tensor_shape([6, 1]), "float32")) if callable(made) else made


@case(on="D S2")
def described(side: Side) -> Any:
    with side.strategy.scope():
        v = make(side)
    return [
        v.name,
        [int(n) for n in v.shape],
        [[int(n) for n in shard.shape] for shard in v],
        len(v.variables),
    ]


@case(on="D", index=list(INDICES))
def sliced(side: Side, index: str) -> Any:
    v = make(side)
    return attempt(lambda: v[INDICES[index]])


@case(on="D S2", method=["assign", "assign_add", "assign_sub"])
def assigned(side: Side, method: str) -> Any:
    with side.strategy.scope():
        v = make(side)
        delta = side.array([[10.0 * i, 1.0] for i in range(5)])
        return after(v, lambda: getattr(v, method)(delta))


@case(on="D", method=["assign", "assign_add"], shape=[[], [4, 2], [7, 2], [5, 1], [5, 3]])
def assigned_of_shape(side: Side, method: str, shape: list[int]) -> Any:
    v = make(side)
    return attempt(lambda: getattr(v, method)(side.array(np.ones(shape))).numpy())


@case(on="D", op=OPERATIONS, rows=["each_once", "one_twice"])
def scattered(side: Side, op: str, rows: str) -> Any:
    v = make(side)
    delta = side.indexed_slices(
        [[10.0, 0.5], [20.0, -4.0], [5.0, 7.0]], [4, 0, 2] if rows == "each_once" else [4, 0, 4]
    )
    return after(v, lambda: getattr(v, f"scatter_{op}")(delta))


@case(on="D")
def batch_scattered(side: Side) -> Any:
    v = make(side)
    return after(v, lambda: v.batch_scatter_update(side.indexed_slices([[10.0, 0.5], [20.0, -4.0]], [4, 0])))


@case(on="D", indices=[[5], [-1], [[1, 0]]])
def scattered_elsewhere(side: Side, indices: list[Any]) -> Any:
    v = make(side)
    delta = side.indexed_slices(np.ones((*np.shape(indices), 2)), indices)
    return attempt(lambda: v.scatter_add(delta).numpy())


@case(on="D", indices=[[0, 2, 4], [1], [0, 2, 1], [4, 0, 4], [5], [-1], [[1, 0]]])
def sparse_read(side: Side, indices: list[Any]) -> Any:
    v = make(side)
    return attempt(lambda: v.sparse_read(side.array(indices, "int32")))


@case(on="D", call=["scatter", "read", "lookup"])
def shards_of_any_size(side: Side, call: str) -> Any:
    v = make(side, [[[1.0, 2.0]], [[5.0, 6.0], [7.0, 8.0]]])
    calls = {
        "scatter": lambda: v.scatter_add(side.indexed_slices([[10.0, 20.0]], [1])).numpy(),
        "read": lambda: v.sparse_read(side.array([1], "int32")),
        "lookup": lambda: side.nn.embedding_lookup(v, side.array([2, 0, 1], "int32")),
    }
    return attempt(calls[call])


@case(on="D")
def operators(side: Side) -> Any:
    v = make(side)
    return [v + 1, 1 - v, v @ side.array([[1.0], [2.0]]), -v, v > 3, v == v, v + v, v**2, abs(v), v / v]


@case(on="D", shards=["none", "empty", "number", "variable", "dtypes", "dims", "shapes", "scalar"])
def constructed(side: Side, shards: str) -> Any:
    made = {
        "none": None,
        "empty": [],
        "number": [1.0],
        "variable": side.Variable([1.0]),
        "dtypes": [side.Variable([1.0]), side.Variable([1])],
        "dims": [side.Variable([[1.0]]), side.Variable([1.0])],
        "shapes": [side.Variable([[1.0]]), side.Variable([[1.0, 2.0]])],
        "scalar": [side.Variable(1.0)],
    }
    out = attempt(lambda: side.ShardedVariable(made[shards]))
    return "made" if hasattr(out, "variables") else out


@case(85, on="D", ids=[[0, 3, 4], [4, 0, 4], [[3, 0], [1, 1]], 2, [5], [-1], [0.5]], max_norm=[None, 3.0])
def looked_up(side: Side, ids: Any, max_norm: float | None) -> Any:
    v = make(side)
    ids = side.array(ids, "float32" if ids == [0.5] else "int32")
    return attempt(lambda: side.nn.embedding_lookup(v, ids, max_norm=max_norm))


@case(85, on="D", table=["array", "variable", "variables", "rows_of_rows"], max_norm=[None, 3.0])
def looked_up_in(side: Side, table: str, max_norm: float | None) -> Any:
    whole = [row for part in PARTS for row in part]
    tables = {
        "array": lambda: side.array(whole),
        "variable": lambda: side.Variable(whole),
        "variables": lambda: [side.Variable(part) for part in PARTS],
        "rows_of_rows": lambda: side.array(np.reshape(whole[:4], (2, 2, 2))),
    }
    return side.nn.embedding_lookup(tables[table](), side.array([1, 0], "int32"), max_norm=max_norm)


@case(85, on="D", combiner=[None, "mean", "sum", "sqrtn", "max"], weights=[False, True], max_norm=[None, 5.0])
def combined(side: Side, combiner: str | None, weights: bool, max_norm: float | None) -> Any:
    ids = side.ragged([[0, 3], [4], [], [1]], "int64")
    given = side.ragged([[1.0, 3.0], [0.0], [], [-1.0]], "float32") if weights else None
    return attempt(
        lambda: side.nn.embedding_lookup_sparse(make(side), ids, given, combiner=combiner, max_norm=max_norm)
    )
