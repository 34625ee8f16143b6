"""Cases about variables: creation, reading, the assign tables, ``extended.update``, checkpoints."""

import tempfile
from collections.abc import Callable
from typing import Any

from parity_cases.observing import Raised, attempt, discard
from parity_cases.registry import case
from parity_cases.side import Side

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
METHODS = ["assign", "assign_add", "assign_sub"]


def state(side: Side, v: Any) -> dict[str, Any]:
    """The value of a variable, component by component, and as read from outside and from each replica."""
    return {
        "components": side.components(v),
        "read": attempt(lambda: side.read(v)),
        "in_replicas": side.local(side.strategy.run(lambda: v + 0.0)),
    }


@case(33, 38, on="S1 S2 S3 C2", sync=["ON_WRITE", "ON_READ"], agg=AGGREGATIONS, method=METHODS)
def own_value(side: Side, sync: str, agg: str, method: str) -> Any:
    """Replica r assigns r + 1 to a variable that starts at 1."""
    v = side.variable(1.0, sync, agg)
    write = getattr(v, method)
    out = attempt(lambda: side.strategy.run(lambda: discard(write(side.replica_id() + 1.0))))
    return out if isinstance(out, Raised) else state(side, v)


EQUAL = ["literal", "array", "array_made_inside"]


def equal(side: Side, what: str) -> Callable[[], Any]:
    """A function that returns 2 in every replica: TensorFlow distinguishes one object from equal ones."""
    if what == "array_made_inside":
        return lambda: side.array(2.0)
    value = 2.0 if what == "literal" else side.array(2.0)
    return lambda: value


@case(33, 34, sync=["ON_WRITE", "ON_READ"], agg=AGGREGATIONS, method=METHODS, what=EQUAL)
def equal_value(side: Side, sync: str, agg: str, method: str, what: str) -> Any:
    """Every replica assigns 2."""
    v = side.variable(1.0, sync, agg)
    write, value = getattr(v, method), equal(side, what)

    def replica_fn() -> None:
        write(value())

    out = attempt(lambda: side.strategy.run(replica_fn))
    return out if isinstance(out, Raised) else state(side, v)


@case(33, 39, on="S1 S2 C2", sync=["ON_WRITE", "ON_READ"], agg=AGGREGATIONS, method=METHODS)
def cross_replica(side: Side, sync: str, agg: str, method: str) -> Any:
    """6 is assigned in the strategy's scope."""
    v = side.variable(1.0, sync, agg)

    def write() -> None:
        with side.strategy.scope():
            discard(getattr(v, method)(6.0))

    out = attempt(write)
    return out if isinstance(out, Raised) else state(side, v)


@case(33, on="S1 S2 C2", method=METHODS)
def outside_every_scope(side: Side, method: str) -> Any:
    v = side.variable(1.0, agg="SUM")
    discard(getattr(v, method)(6.0))
    return state(side, v)


@case(33, on="S1 C2", agg=["SUM", "MEAN"], what=EQUAL)
def equal_value_elsewhere(side: Side, agg: str, what: str) -> Any:
    v, value = side.variable(1.0, agg=agg), equal(side, what)

    def replica_fn() -> None:
        v.assign_add(value())

    out = attempt(lambda: side.strategy.run(replica_fn))
    return out if isinstance(out, Raised) else state(side, v)


@case(33, agg=AGGREGATIONS, method=METHODS)
def cross_replica_per_replica_value(side: Side, agg: str, method: str) -> Any:
    """A PerReplica [1, 2] is assigned from cross-replica context."""
    v = side.variable(1.0, "ON_WRITE", agg)
    x = side.per_replica([1.0, 2.0])

    def write() -> None:
        with side.strategy.scope():
            discard(getattr(v, method)(x))

    out = attempt(write)
    return out if isinstance(out, Raised) else state(side, v)


@case(33, sync=["ON_WRITE", "ON_READ"], agg=["SUM", "MEAN", "ONLY_FIRST_REPLICA"], method=METHODS)
def returned_in_replicas(side: Side, sync: str, agg: str, method: str) -> Any:
    """The result of assign in a replica, used as an array."""
    v = side.variable(1.0, sync, agg)
    return side.strategy.run(lambda: getattr(v, method)(side.replica_id() + 1.0) * 10.0)


@case(33, on="S1 S2 C2", method=METHODS)
def returned_in_scope(side: Side, method: str) -> Any:
    v = side.variable(1.0)
    with side.strategy.scope():
        return getattr(v, method)(6.0) * 10.0


@case(33, on="S1 S2")
def several_writes_in_one_run(side: Side) -> Any:
    v = side.variable(1.0, agg="SUM")

    def replica_fn() -> Any:
        before = v + 0.0
        v.assign_add(side.replica_id() + 1.0)
        between = v + 0.0
        v.assign(v * (side.replica_id() + 1.0))
        return before, between, v + 0.0

    out = side.strategy.run(replica_fn)
    return {"out": out, "components": side.components(v)}


@case(33, on="S1 S2 C2")
def write_seen_by_next_run(side: Side) -> Any:
    v = side.variable([1.0, 2.0], agg="MEAN")
    side.strategy.run(lambda: discard(v.assign_add([1.0, 1.0])))
    v.assign_sub([0.5, 0.5])
    return side.strategy.run(lambda: v * 2.0)


@case(37, on="S2 S3 C2")
def only_first_replica(side: Side) -> Any:
    v = side.variable(15.0, agg="ONLY_FIRST_REPLICA")
    side.strategy.run(lambda: discard(v.assign(side.replica_id())))
    return side.components(v)


@case(38, on="S2 S3 S4", agg=["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def on_read_reads(side: Side, agg: str) -> Any:
    v = side.variable(0.0, "ON_READ", agg)
    side.strategy.run(lambda: discard(v.assign(side.replica_id())))
    with side.strategy.scope():
        read = {"value": v.read_value() + 0.0, "operator": v + 0.0}
    return {**read, "numpy": v.numpy()}


@case(39, on="S2 S3")
def on_read_sum_assign(side: Side) -> Any:
    v = side.variable(0.0, "ON_READ", "SUM")
    with side.strategy.scope():
        v.assign(float(side.num_replicas))
    return side.components(v)


@case(39, method=["assign_add", "assign_sub"])
def on_read_sum_add_in_scope(side: Side, method: str) -> Any:
    v = side.variable(0.0, "ON_READ", "SUM")
    with side.strategy.scope():
        return attempt(lambda: discard(getattr(v, method)(2.0)))


@case(39)
def on_read_int_sum(side: Side) -> Any:
    v = side.variable(0, "ON_READ", "SUM", dtype="int32")
    with side.strategy.scope():
        v.assign(5)
    return {"components": side.components(v), "read": side.read(v)}


@case(40)
def on_read_none(side: Side) -> Any:
    v = side.variable(0.0, "ON_READ", "NONE")
    with side.strategy.scope():
        return attempt(lambda: v.read_value() + 0.0)


@case(41, on="S2 S3")
def on_read_sum_initial_value(side: Side) -> Any:
    v = side.variable(1.0, "ON_READ", "SUM")
    first = side.read(v)
    with side.strategy.scope():
        v.assign(6.0)
    return {"first": first, "assigned": side.read(v), "components": side.components(v)}


@case(38, on="S2 S3")
def on_read_counts_over_runs(side: Side) -> Any:
    v = side.variable(0.0, "ON_READ", "SUM")

    @side.function
    def step() -> None:
        side.strategy.run(lambda: discard(v.assign_add(side.replica_id() + 1.0)))

    for _ in range(3):
        step()
    return {"components": side.components(v), "read": side.read(v)}


@case(43)
def int_mean(side: Side) -> Any:
    return attempt(lambda: discard(side.variable(1, agg="MEAN", dtype="int32")))


@case(43, on="S1 S2", agg=["SUM", "ONLY_FIRST_REPLICA"], method=METHODS)
def int_variable(side: Side, agg: str, method: str) -> Any:
    v = side.variable(1, agg=agg, dtype="int32")

    def replica_fn() -> None:
        getattr(v, method)(side.to_int(side.replica_id()) + 1)

    side.strategy.run(replica_fn)
    return side.components(v)


@case(31, on="S2 S3", value=["random", "callable"])
def initial_value_is_made_once(side: Side, value: str) -> Any:
    with side.strategy.scope():
        v = side.Variable(side.random_normal if value == "callable" else side.random_normal())
    components = side.components(v)
    return all(float(x) == float(components[0]) for x in components)


@case(31, on="S1 S2")
def created_in_run(side: Side) -> Any:
    made = []

    def replica_fn() -> Any:
        if side.creates_another(made):
            made.append(side.Variable([1.0, 2.0], name="made"))
        return made[-1] * (side.replica_id() + 1.0)

    first = side.strategy.run(replica_fn)
    second = side.strategy.run(replica_fn)
    return {"first": first, "second": second, "components": side.components(made[-1])}


@case(31)
def created_in_run_from_own_value(side: Side) -> Any:
    made = []

    def replica_fn() -> Any:
        made.append(side.Variable(side.replica_id() + 5.0))
        return made[-1] + 0.0

    return attempt(lambda: side.strategy.run(replica_fn))


@case(32, on="S1 S2 C2")
def name(side: Side) -> Any:
    return side.variable(1.0, name="w").name.removesuffix(":0")


@case(0, on="S2", sync=["AUTO", "ON_WRITE", "ON_READ", "NONE"])
def attributes(side: Side, sync: str) -> Any:
    def make() -> Any:
        v = side.variable([[1.0, 2.0]], sync, "SUM")
        return {
            "trainable": v.trainable,
            "synchronization": v.synchronization.name,
            "aggregation": v.aggregation.name,
            "shape": list(v.shape),
        }

    return attempt(make)


@case(0)
def trainable_on_read(side: Side) -> Any:
    return attempt(lambda: side.variable(1.0, "ON_READ", "SUM", trainable=True).trainable)


@case(0, on="S1 S2 C2", method=METHODS)
def wrong_shape(side: Side, method: str) -> Any:
    v = side.variable([1.0, 2.0], agg="ONLY_FIRST_REPLICA")
    value = side.array([1.0, 2.0, 3.0])
    return {
        "replica": attempt(lambda: side.strategy.run(lambda: discard(getattr(v, method)(value)))),
        "outside": attempt(lambda: discard(getattr(v, method)(value))),
    }


@case(0, on="S1 S2")
def variable_made_outside_the_scope(side: Side) -> Any:
    v = side.Variable(0.0)
    side.strategy.run(lambda: discard(v.assign_add(1.0)))
    return side.read(v)


@case(0, on="S2 C2")
def variable_made_outside_the_scope_is_read(side: Side) -> Any:
    v = side.Variable(3.0)
    return side.strategy.run(lambda: v * (side.replica_id() + 1.0))


@case(0, on="S1 S2 C2")
def arithmetic_in_scope(side: Side) -> Any:
    v = side.variable([1.0, 2.0])
    w = side.variable([3.0, 5.0])
    with side.strategy.scope():
        return [v + w, v - 1.0, 2.0 * v, v / w, -v, v**2, v[0] + 0.0]


@case(0, on="S1 S2 C2", where=["scope", "run"])
def in_functions(side: Side, where: str) -> Any:
    """A variable is handed to the framework's functions as if it were an array."""
    v = side.variable([[0.5, -1.0], [2.0, 0.25]])

    def compute() -> Any:
        return [side.tanh(v), side.matmul(v, v), side.stop_gradient(v), side.sum(v)]

    if where == "run":
        return side.local(side.strategy.run(lambda: side.stack([side.sum(x) for x in compute()])))
    with side.strategy.scope():
        return compute()


@case(48, on="S1 S2 C2", method=METHODS)
def extended_update(side: Side, method: str) -> Any:
    v = side.variable(5.0)
    with side.strategy.scope():
        for value in (side.array(2.0), 1.0):
            side.strategy.extended.update(v, lambda v, value: getattr(v, method)(value), args=(value,))
    return side.components(v)


@case(48)
def extended_update_kwargs(side: Side) -> Any:
    v = side.variable(5.0)
    side.strategy.extended.update(v, lambda v, by: v.assign(v * by), kwargs={"by": 3.0})
    return side.components(v)


@case(48)
def extended_update_ungrouped(side: Side) -> Any:
    v = side.variable(5.0)
    out = side.strategy.extended.update(v, lambda v: v.assign_add(1.0) * 2.0, group=False)
    return {"length": len(out), "first": out[0], "components": side.components(v)}


@case(48)
def extended_update_per_replica_argument(side: Side) -> Any:
    v = side.variable(5.0, "ON_READ", "SUM")
    x = side.per_replica([1.0, 2.0])
    out = attempt(lambda: side.strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(x,)))
    return out if isinstance(out, Raised) else side.components(v)


@case(48)
def extended_update_of_outside_variable(side: Side) -> Any:
    v = side.Variable(5.0)
    return attempt(lambda: discard(side.strategy.extended.update(v, lambda v: v.assign(1.0))))


@case(48)
def extended_update_in_replica(side: Side) -> Any:
    v = side.variable(5.0)

    def replica_fn() -> None:
        side.strategy.extended.update(v, lambda v: v.assign(1.0))

    out = attempt(lambda: side.strategy.run(replica_fn))
    return out if isinstance(out, Raised) else side.components(v)


@case(46, agg=["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def checkpoint_on_read(side: Side, agg: str) -> Any:
    """Components (3, 4) are saved and restored into a plain variable; then 2 is restored into them."""
    v = side.variable(0.0, "ON_READ", agg)
    side.strategy.run(lambda: discard(v.assign(side.replica_id() + 3.0)))
    plain = side.Variable(0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = side.save(folder + "/first", v)
        side.restore(path, plain)
        saved = side.read(plain)
        plain.assign(2.0)
        path = side.save(folder + "/second", plain)
        side.restore(path, v)
    return {"saved": saved, "restored": side.components(v)}


@case(47, on="S2", alone=True, to=["S3", "S1", "D"])
def checkpoint_across_sizes(side: Side, to: str) -> Any:
    v = side.variable([1.0, 2.0], agg="MEAN")
    v.assign([3.0, 4.0])
    with side.make_strategy(to).scope():
        other = side.Variable([0.0, 0.0])
    with tempfile.TemporaryDirectory() as folder:
        path = side.save(folder + "/first", v)
        side.restore(path, other)
        there = side.read(other)
        other.assign([5.0, 6.0])
        path = side.save(folder + "/second", other)
        side.restore(path, v)
    return {"there": there, "back": side.components(v)}
