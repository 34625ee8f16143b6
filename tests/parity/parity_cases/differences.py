"""The intended differences between replicax and TensorFlow, and replicax's results.

``DIFFERENCES``: case -> the row of the design's table "Where we differ from TensorFlow" (or the place that says so)
and replicax's observation. ``OPEN``: recorded from TensorFlow, but not decided and not tested.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from parity_cases.assigning import EQUAL, METHODS
from parity_cases.feeding import rows_and_batch
from parity_cases.registry import CASES, Case
from parity_cases.scattering import OPERATIONS
from parity_cases.training import DENOMINATOR, LOOKED_UP, NORMALISED_ROWS, TABLE


@dataclasses.dataclass(frozen=True)
class Difference:
    """``gives`` is replicax's observation; with ``like`` it is TensorFlow's observation in that other case."""

    row: str
    gives: Any = None
    like: str | None = None


DIFFERENCES: dict[str, Difference] = {}
OPEN: dict[str, str] = {}


def _differ(row: str, given: dict[str, Any]) -> None:
    for name, gives in given.items():
        DIFFERENCES[name] = Difference(row, gives)


def _raises(row: str, kind: str, names: Iterable[str]) -> None:
    _differ(row, {name: {"raises": kind, "is_a": []} for name in names})


def _state(value: float, num_replicas: int, num_components: int) -> Any:
    return {
        "components": [value] * num_components,
        "read": value,
        "in_replicas": [value] * num_replicas,
    }


# Rows of the table.

_raises(
    "ON_WRITE with aggregation NONE: an error naming the variable, unless the value is proven the same",
    "ValueError",
    [
        *(f"assigning.own_value[ON_WRITE,NONE,{m}]@{on}" for m in METHODS for on in ("S2", "S3")),
        *(f"scattering.in_replicas[{op},NONE,{i}]@S2" for op in OPERATIONS for i in ("same", "own")),
    ],
)
_raises(
    "cross-replica assign(PerReplica): an error: reduce it first",
    "ValueError",
    [name for name in CASES if name.startswith("assigning.cross_replica_per_replica_value")],
)
_SUMMED = {"assign": 4.0, "assign_add": 5.0, "assign_sub": -3.0}
_differ(
    "ON_WRITE SUM with a Python literal: every replica contributes it, as with a tensor",
    {
        f"assigning.equal_value[ON_WRITE,SUM,{method},{what}]@S2": _state(_SUMMED[method], 2, 2)
        for method in METHODS
        for what in EQUAL
        if what != "array_made_inside"
    }
    | {
        f"assigning.equal_value_elsewhere[SUM,{what}]@C2": _state(5.0, 2, 1)
        for what in EQUAL
        if what != "array_made_inside"
    },
)
_differ(
    "default loss denominator: the true global size",
    {
        "losses.average_loss_uneven[None]@S2": {"per_replica": [1.2, 1.8]},
        "losses.average_loss_empty_replica[None]@S2": {"per_replica": [2.0, 0.0]},
    },
)
DIFFERENCES["training.keras_uneven_default_denominator@S2"] = Difference(
    "default loss denominator: the true global size", like="training.keras_uneven[sgd]@S2"
)
_raises(
    "reduce(SUM, plain tensor, axis=0): an error, as for axis=None",
    "ValueError",
    [f"reducing.plain_array_over_axis[SUM]@{on}" for on in ("S2", "C2")],
)
_differ(
    "gather of a nested structure: maps over the structure",
    {"reducing.gather_structure@S2": {"a": [1.0, 2.0, 3.0, 4.0]}},
)
_differ(
    "int MEAN: the default float type",
    {
        "reducing.int_mean[0]@S1": 1.5,
        "reducing.int_mean[None]@S2": [2.5, 4.0],
        "reducing.int_mean[0]@S2": 3.25,
        "reducing.triangle[MEAN,int32]@S2": 4 / 3,
        "reducing.triangle[MEAN,int32]@C2": 4 / 3,
        "reducing.triangle[MEAN,int32]@S3": 16 / 6,
        "reducing.triangle[MEAN,int32]@S4": 4.0,
        "collectives.all_reduce_int[MEAN]@S2": [1.5, 1.5],
        "losses.average_loss_of_ints@S2": {"per_replica": [0.75, 2.0]},
    },
)
_differ(
    "merge_call under a nested function or control flow: works wherever a collective works",
    {
        "replicas.merge_call_in_nested_function@S2": [3.0, 3.0],
        "collectives.all_reduce_in_nested_function@S2": [3.0, 3.0],
    },
)
_differ(
    "bare AttributeError (the int 0 has no shape): 0 is a number like 1",
    {"reducing.plain_number[MEAN,0]@S2": 0},
)

# The split of a batch of the numbers 0, 1, ...: the rules of both, restated independently of either program.

BATCHES = [
    f"feeding.{name}["
    for name in (
        "batches",
        "batches_dropping_remainder",
        "batches_with_policy",
        "batches_of_range",
        "batches_of_files",
    )
]


def _evenly(num_rows: int, num_replicas: int) -> list[int]:
    """Section 4 of the design: sizes that differ by at most one, larger first."""
    return [num_rows // num_replicas + (r < num_rows % num_replicas) for r in range(num_replicas)]


def _as_tensorflow(num_rows: int, batch: int, num_replicas: int, policy: str) -> list[int]:
    """Section 3.1 of the specification: chunks of ceil(B / R), or the places of a full batch, filled in order."""
    chunk = -(-num_rows // num_replicas)
    is_by_data = policy in ("AUTO", "DATA")
    sizes = []
    for place in [chunk] * num_replicas if is_by_data else _evenly(batch, num_replicas):
        sizes.append(min(place, num_rows - sum(sizes)))
    return sizes


def _cut_otherwise(case: Case) -> list[list[list[int]]] | None:
    """The rows of each replica at each step; None if TensorFlow gives the same."""
    rows, batch = rows_and_batch(case.params.get("size", "10/4"))
    drops = case.params.get("drop_remainder", "dropping" in case.id)
    policy = case.params.get("policy", "AUTO")
    if "files" in case.id and policy == "AUTO":
        policy = "FILE"
    num_replicas = int(case.on[1:])
    steps, is_other = [], False
    for start in range(0, rows - batch + 1 if drops else rows, batch):
        num_rows = min(batch, rows - start)
        sizes = _evenly(num_rows, num_replicas)
        is_other |= sizes != _as_tensorflow(num_rows, batch, num_replicas, policy)
        stops = [start + sum(sizes[: r + 1]) for r in range(num_replicas)]
        steps.append([list(range(stop - size, stop)) for stop, size in zip(stops, sizes, strict=True)])
    return steps if is_other else None


_differ(
    "batch split depends on the policy and may starve replicas: one rule, section 4",
    {
        name: gives
        for name, case in CASES.items()
        if name.startswith(tuple(BATCHES)) and (gives := _cut_otherwise(case)) is not None
    },
)

# Section 2 of the design.

_differ(
    "What run returns: every traced array comes back as PerReplica, whatever its replication",
    {
        f"replicas.returned_array_that_is_the_same[{where}]@S2": [[1.0, 2.0], [1.0, 2.0]]
        for where in ("closure", "argument")
    }
    | {
        "replicas.merge_call_reduces[SUM]@S2": [3.0] * 2,
        "replicas.merge_call_reduces[SUM]@S3": [6.0] * 3,
        "replicas.merge_call_reduces[MEAN]@S2": [1.5] * 2,
        "replicas.merge_call_reduces[MEAN]@S3": [2.0] * 3,
        "replicas.merge_call_reduces_over_axis[SUM]@S2": [10.0] * 2,
        "replicas.merge_call_reduces_over_axis[MEAN]@S2": [2.5] * 2,
        "replicas.merge_call_gathers@S2": [[1.0, 2.0, 3.0, 4.0]] * 2,
        "replicas.merge_call_local_results@S2": [12.0] * 2,
    },
)
_raises(
    "A tape outside run, rx.function or value_and_grad is an error", "RuntimeError", ["tape.outside_run@D"]
)
for _op, _like in (
    ("SUM", "training.keras_even[sgd]@S2"),
    ("MEAN", "training.keras_all_reduced_by_hand[MEAN]@S2"),
):
    DIFFERENCES[f"training.keras_all_reduced_before_apply[{_op}]@S2"] = Difference(
        "The aggregation of gradients: all are summed, except one that has already been reduced", like=_like
    )


def _averaged_statistics() -> Any:
    """Half of the mean of two replicas' means, and half of the 1 that a variance begins with."""
    halves = NORMALISED_ROWS.reshape(2, 2, 2)
    mean = 0.5 * halves.mean(axis=1).mean(axis=0)
    variance = 0.5 + 0.5 * halves.var(axis=1).mean(axis=0)
    evaluated = (halves - mean) / np.sqrt(variance)
    return {"evaluated": evaluated.tolist(), "mean and variance": [mean.tolist(), variance.tolist()]}


def _gradient_of_table(rows: str) -> np.ndarray:
    gradient = np.zeros_like(TABLE)
    np.add.at(gradient, LOOKED_UP[rows], 2 * TABLE[LOOKED_UP[rows]] / DENOMINATOR)
    return gradient


def _clipped_table(clip: str, rows: str) -> Any:
    """One step of SGD with rate 1: the gradient of the whole table, over the global batch, is clipped once."""
    gradient = _gradient_of_table(rows)
    if clip == "clipvalue":
        return (TABLE - np.clip(gradient, -0.5, 0.5)).tolist()
    return (TABLE - gradient * min(1.0, 0.5 / np.linalg.norm(gradient))).tolist()


_differ(
    "evaluation in run reads the average of the replicas' moving statistics; in TensorFlow each replica reads its own",
    {"training.keras_moving_statistics_read_in_run@S2": _averaged_statistics()},
)
_differ(
    "a Keras optimizer clips the sum of the replicas' gradients; in TensorFlow each replica clips its own before the sum",
    {
        f"training.keras_clipped_table[{clip},{rows}]@S2": _clipped_table(clip, rows)
        for clip, rows in (("global_clipnorm", "once"), ("clipnorm", "once"))
    },
)
_differ(
    "the gradient of a table is clipped as a whole; TensorFlow clips and counts each lookup of a row by itself",
    {
        f"training.keras_clipped_table[{clip},again]@{on}": _clipped_table(clip, "again")
        for clip in ("global_clipnorm", "clipnorm", "clipvalue")
        for on in ("S1", "S2")
    }
    | {
        "training.norm_of_the_gradient_of_a_table[again]@S1": [
            float(np.linalg.norm(_gradient_of_table("again")))
        ]
    },
)

# In no table yet: TensorFlow fails, or answers wrongly, by accident, and there is one sensible answer.

_differ(
    "not in the table: TensorFlow's ring gather knows no negative axis, its other gathers do",
    {
        "reducing.gather_vector[-1]@S2": [1.0, 2.0, 3.0, 2.0, 4.0, 6.0],
        "reducing.gather_vector[-1]@S3": [1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 3.0, 6.0, 9.0],
        "reducing.gather_matrix[-1]@S2": [[1.0, 2.0, 3.0, 2.0, 4.0, 6.0]],
        "reducing.gather_matrix[-1]@S3": [[1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 3.0, 6.0, 9.0]],
        "reducing.gather_matrix[-2]@S2": [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]],
        "reducing.gather_matrix[-2]@S3": [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 6.0, 9.0]],
        "collectives.all_gather_vector[-1]@S2": [[1.0, 2.0, 2.0, 4.0]] * 2,
        "collectives.all_gather_vector[-1]@S3": [[1.0, 2.0, 2.0, 4.0, 3.0, 6.0]] * 3,
        "collectives.all_gather_matrix[-1]@S2": [[[1.0, 2.0, 2.0, 4.0], [3.0, 4.0, 6.0, 8.0]]] * 2,
        "collectives.all_gather_matrix[-1]@S3": [
            [[1.0, 2.0, 2.0, 4.0, 3.0, 6.0], [3.0, 4.0, 6.0, 8.0, 9.0, 12.0]]
        ]
        * 3,
    },
)
_differ(
    "not in the table: reduce maps over structures under every strategy and with an axis; TensorFlow fails, "
    "and for MEAN under CentralStorage gives replica 0's values",
    {
        "reducing.structure[SUM]@C2": {"a": 3.0, "b": [5.0, 10.0]},
        "reducing.structure[MEAN]@C2": {"a": 1.5, "b": [2.5, 5.0]},
        "reducing.structure_over_axis[SUM]@S2": {"a": 10.0, "b": 10.0},
        "reducing.structure_over_axis[MEAN]@S2": {"a": 2.5, "b": 2.5},
    },
)
_differ(
    "not in the table: ON_READ with aggregation NONE can be assigned from outside; only reading it fails",
    {
        f"assigning.cross_replica[ON_READ,NONE,{method}]@S2": _state(value, 2, 2)
        | {"read": {"raises": "ValueError", "is_a": []}}
        for method, value in (("assign", 6.0), ("assign_add", 7.0), ("assign_sub", -5.0))
    },
)
_raises(
    "not in the table: gather refuses IndexedSlices, as all_gather does on both sides; TensorFlow's gather "
    "makes them dense",
    "NotImplementedError",
    ["reducing.gather_indexed_slices@S2"],
)

_raises(
    "not in the table: rows are counted once, so all arrays of a batch have the same number of them; TensorFlow "
    "cuts each by itself",
    "ValueError",
    [f"feeding.arrays_with_different_numbers_of_rows@{on}" for on in ("S1", "S2")],
)
_raises(
    "not in the table: a dataset of rows is refused on one device and where a row is a vector too, as the text of "
    "TensorFlow's documentation says; it goes on, and cuts the vector",
    "ValueError",
    ["feeding.unbatched_on_one_device@S1", "feeding.unbatched_vectors@S2"],
)
_raises(
    "not in the table: what is no dataset is a TypeError; for None TensorFlow's check fails by accident",
    "TypeError",
    ["feeding.no_dataset[none]@S2"],
)
_raises(
    "not in the table: InputOptions validates itself; TensorFlow ignores a buffer of none, and where batches are "
    "cut the place of the dataset",
    "ValueError",
    [f"feeding.batches_with_options[{chosen}]@S2" for chosen in ("place", "place_per_replica", "no_buffer")],
)
_differ(
    "not in the table: InputOptions validates itself, before the function is called",
    {
        "feeding.from_function_with_options[no_buffer]@S2": {
            "contexts": [],
            "given": {"raises": "ValueError", "is_a": []},
        }
    },
)
_differ(
    "not in the table: PER_REPLICA under every strategy; TensorFlow ignores it under CentralStorage, and refuses "
    "it on one device",
    {
        "feeding.from_function_with_options[per_replica]@S1": {
            "contexts": [[1, 0]],
            "given": [[[0, 1]], [[2, 3]], [[4]]],
        },
        "feeding.from_function_with_options[per_replica]@C2": {
            "contexts": [[2, 0], [2, 1]],
            "given": [[[0, 1], [1, 2]], [[2, 3], [3, 4]], [[4], []]],
        },
    },
)
_differ(
    "`ShardedVariable.sparse_read` returns shard order: index order",
    {
        "sharding.sparse_read[[0;2;1]]@D": [[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]],
        "sharding.sparse_read[[4;0;4]]@D": [[9.0, 10.0], [1.0, 2.0], [9.0, 10.0]],
    },
)
_differ(
    "not in the table: rows behind a new dim are those of the whole; TensorFlow takes them of each shard",
    {"sharding.sliced[new_dim_and_rows]@D": [[[3.0, 4.0], [5.0, 6.0]]]},
)
_differ(
    "not in the table: an array of numbers takes these rows; TensorFlow has it not",
    {f"sharding.sliced[{index}]@D": [[1.0, 2.0], [5.0, 6.0]] for index in ("list", "array")},
)
_differ(
    "not in the table: shards may have any sizes; TensorFlow refuses what is not evenly cut",
    {
        "sharding.shards_of_any_size[scatter]@D": [[1.0, 2.0], [15.0, 26.0], [7.0, 8.0]],
        "sharding.shards_of_any_size[read]@D": [[5.0, 6.0]],
    },
)
_raises(
    "not in the table: shapes cannot change; TensorFlow assigns the first rows and columns of a larger array",
    "ValueError",
    [
        f"sharding.assigned_of_shape[{method},{shape}]@D"
        for method in ("assign", "assign_add")
        for shape in ("[7;2]", "[5;3]")
    ],
)
_differ(
    "the guide of checkpoints: the first replica gets all of a restored sum, so that integers stay exact",
    {
        "assigning.checkpoint_on_read[SUM]@S2": {"saved": 7.0, "restored": [2.0, 0.0]},
        "saving.integer_of_others[SUM]@S2": {"components": [5, 0], "read": 5},
    },
)
_differ(
    "the guide of checkpoints: as many replicas as before get back what each had",
    {
        f"saving.on_as_many_replicas[{agg},{dtype}]@S2": {
            "components": [3.0, 4.0] if floats else [3, 4],
            "read": read,
        }
        for agg, dtype, floats, read in (
            ("SUM", "float32", True, 7.0),
            ("SUM", "int32", False, 7),
            ("MEAN", "float32", True, 3.5),
            ("ONLY_FIRST_REPLICA", "float32", True, 3.0),
            ("ONLY_FIRST_REPLICA", "int32", False, 3),
        )
    },
)
_differ(
    "not in the table: what has several names is saved under the one that was given first; in TensorFlow the first by alphabet",
    {f"saving.names_of_nests@{on}": ["inner/first", "many/0", "many/1/key"] for on in ("D", "S2")},
)
_MISMATCH = {"raises": "CheckpointMismatchError", "is_a": ["CheckpointError", "ReplicaxError", "ValueError"]}
_differ(
    "the guide of checkpoints: a restore of which nothing matches is an error, and not only in its assertions",
    {"saving.on_one_side[assert_nontrivial_match,other]@S2": [5.0, 6.0, _MISMATCH]},
)
_differ(
    "the guide of checkpoints: of another model is an error; TensorFlow begins anew, without a word",
    {
        "saving.managed[other]@S2": [_MISMATCH, 5.0, 6.0],
    },
)
OPEN |= {
    name: "one copy in TensorFlow: ON_READ aggregates when written, as ON_WRITE does"
    for name in CASES
    if name.startswith(("assigning.own_value[ON_READ", "assigning.cross_replica[ON_READ"))
    and name.endswith("@C2")
}
OPEN |= {
    "assigning.variable_made_outside_the_scope@S2": "TensorFlow adds once per replica to a variable that no "
    "strategy made; one value, or an error, would be as good",
    "assigning.created_in_run_from_own_value@S2": "TensorFlow silently takes replica 0's initial value",
    "collectives.all_reduce_number[SUM]@S2": "AttributeError in TensorFlow; an error and 3.0 are both sound",
    "collectives.all_reduce_number[MEAN]@S2": "AttributeError in TensorFlow; an error and 1.5 are both sound",
    "contexts.input_context_text@D": "the text names the library",
}
