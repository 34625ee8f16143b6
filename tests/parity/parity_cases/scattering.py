"""Cases about ``Variable.scatter_*``."""

from typing import Any

from parity_cases.assigning import AGGREGATIONS
from parity_cases.observing import Raised, attempt, discard
from parity_cases.registry import case
from parity_cases.side import Side

OPERATIONS = ["add", "sub", "mul", "div", "min", "max", "update"]


@case(45, op=OPERATIONS, agg=AGGREGATIONS, index=["same", "own"])
def in_replicas(side: Side, op: str, agg: str, index: str) -> Any:
    """Replica r scatters r + 2 into row 0, or into row r, of [4, 4, 4]."""
    v = side.variable([4.0, 4.0, 4.0], agg=agg)

    def replica_fn() -> None:
        r = side.replica_id()
        rows = side.stack([r * 0.0 if index == "same" else r])
        getattr(v, f"scatter_{op}")(side.indexed_slices(side.stack([r + 2.0]), rows))

    out = attempt(lambda: side.strategy.run(replica_fn))
    return out if isinstance(out, Raised) else side.components(v)


@case(45, on="S1 S2 C2", op=OPERATIONS)
def in_scope(side: Side, op: str) -> Any:
    v = side.variable([4.0, 4.0, 4.0])

    def write() -> None:
        with side.strategy.scope():
            getattr(v, f"scatter_{op}")(side.indexed_slices([2.0, 8.0], [0, 2]))

    out = attempt(write)
    return out if isinstance(out, Raised) else side.components(v)


@case(45, on="S1", op=OPERATIONS)
def in_one_replica(side: Side, op: str) -> Any:
    v = side.variable([4.0, 4.0, 4.0], agg="SUM")
    side.strategy.run(lambda: discard(getattr(v, f"scatter_{op}")(side.indexed_slices([2.0, 8.0], [0, 2]))))
    return side.components(v)


@case(45, on="S1 S2", op=["add", "sub", "mul"])
def repeated_index(side: Side, op: str) -> Any:
    v = side.variable([4.0, 4.0, 4.0], agg="ONLY_FIRST_REPLICA")
    side.strategy.run(lambda: discard(getattr(v, f"scatter_{op}")(side.indexed_slices([2.0, 3.0], [1, 1]))))
    return side.components(v)


@case(45)
def max_of_first_replica(side: Side) -> Any:
    v = side.variable([0.0, 0.0, 0.0], agg="ONLY_FIRST_REPLICA")
    side.strategy.run(lambda: discard(v.scatter_max(side.indexed_slices([1.0], [0]))))
    return side.components(v)


@case(45, agg=["NONE", "SUM"], op=OPERATIONS)
def on_read(side: Side, agg: str, op: str) -> Any:
    v = side.variable([4.0, 4.0, 4.0], "ON_READ", agg)
    return attempt(
        lambda: side.strategy.run(
            lambda: discard(getattr(v, f"scatter_{op}")(side.indexed_slices([2.0], [0])))
        )
    )


@case(45, on="S1 S2", op=["add", "update"])
def rows(side: Side, op: str) -> Any:
    v = side.variable([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], agg="SUM" if op == "add" else "NONE")
    values = side.array([[10.0, 20.0], [30.0, 40.0]])

    def replica_fn() -> None:
        getattr(v, f"scatter_{op}")(side.indexed_slices(values, [2, 0]))

    side.strategy.run(replica_fn)
    return side.components(v)
