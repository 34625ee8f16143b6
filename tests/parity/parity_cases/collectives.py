"""Cases about ``ReplicaContext.all_reduce`` and ``all_gather``, their gradients included."""

from typing import Any

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

OPS = ["SUM", "MEAN"]


def context(side: Side) -> Any:
    return side.dist.get_replica_context()


@case(49, on="S1 S2 S3 S4 C2", op=OPS)
def all_reduce_equal(side: Side, op: str) -> Any:
    return side.local(side.strategy.run(lambda: context(side).all_reduce(op, side.array(1.0))))


@case(49, on="S1 S2 S3 C2", op=OPS)
def all_reduce_own(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        return context(side).all_reduce(op, side.array([1.0, 10.0]) * (side.replica_id() + 1.0))

    return side.local(side.strategy.run(replica_fn))


@case(49, on="S2 S3 C2", op=OPS)
def all_reduce_structure(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        return context(side).all_reduce(op, {"a": r + 1.0, "b": (r + 2.0, side.array([1.0, 2.0]))})

    return side.strategy.experimental_local_results(side.strategy.run(replica_fn))


@case(49, on="S1 S2 S3 C2", op=OPS)
def all_reduce_indexed_slices(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        slices = side.indexed_slices(side.array([[1.0]]), [0], [5, 1])
        return side.dense(context(side).all_reduce(op, slices))

    return side.local(side.strategy.run(replica_fn))


@case(49, op=OPS)
def all_reduce_indexed_slices_of_other_rows(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        slices = side.indexed_slices(
            side.array([[1.0, 2.0], [3.0, 4.0]]) * (r + 1.0), side.stack([r, r + 1.0]), [4, 2]
        )
        return side.dense(context(side).all_reduce(op, slices))

    return side.local(side.strategy.run(replica_fn))


@case(49, op=OPS)
def all_reduce_int(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        return context(side).all_reduce(op, side.to_int(side.replica_id() + 1.0))

    return side.local(side.strategy.run(replica_fn))


@case(49, op=OPS)
def all_reduce_variable(side: Side, op: str) -> Any:
    v = side.variable([1.0, 2.0])
    return side.local(side.strategy.run(lambda: context(side).all_reduce(op, v)))


@case(49, how=["member", "text"])
def all_reduce_op_as(side: Side, how: str) -> Any:
    op = side.dist.ReduceOp.MEAN if how == "member" else "mean"
    return side.local(side.strategy.run(lambda: context(side).all_reduce(op, side.replica_id())))


@case(49)
def all_reduce_wrong_op(side: Side) -> Any:
    return attempt(lambda: side.strategy.run(lambda: context(side).all_reduce("MAX", side.array(1.0))))


@case(49, on="S1 S2", op=OPS)
def all_reduce_number(side: Side, op: str) -> Any:
    return attempt(lambda: side.local(side.strategy.run(lambda: context(side).all_reduce(op, 1.5))))


@case(49, on="D", op=OPS)
def all_reduce_by_default(side: Side, op: str) -> Any:
    return context(side).all_reduce(op, side.array([1.0, 2.0]))


@case(49, on="S2")
def all_reduce_twice(side: Side) -> Any:
    def replica_fn() -> Any:
        total = context(side).all_reduce("SUM", side.replica_id() + 1.0)
        return context(side).all_reduce("MEAN", total * (side.replica_id() + 1.0))

    return side.local(side.strategy.run(replica_fn))


@case(49, on="S2")
def all_reduce_in_function(side: Side) -> Any:
    @side.function
    def step(x: Any) -> Any:
        return side.strategy.run(lambda x: context(side).all_reduce("SUM", x * x), args=(x,))

    return side.local(step(side.per_replica([[1.0, 2.0], [3.0, 4.0]])))


@case(49, alone=True)
def all_reduce_in_nested_function(side: Side) -> Any:
    def replica_fn() -> Any:
        @side.nested_function
        def inner(x: Any) -> Any:
            return context(side).all_reduce("SUM", x)

        return inner(side.replica_id() + 1.0)

    return attempt(lambda: side.local(side.strategy.run(replica_fn)))


@case(49, on="S1 S2 S3", op=OPS)
def all_reduce_gradient(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        x = side.replica_id() + 1.0
        with side.GradientTape() as tape:
            tape.watch(x)
            y = context(side).all_reduce(op, x * (side.replica_id() + 1.0))
        return y, tape.gradient(y, x)

    return side.strategy.run(replica_fn)


@case(49, on="S1 S2 S3", op=OPS)
def all_reduce_gradient_of_square(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        x = side.array([1.0, 2.0]) * (r + 1.0)
        with side.GradientTape() as tape:
            tape.watch(x)
            y = context(side).all_reduce(op, x * x)
            loss = side.sum(y * y) * (r + 1.0)
        return tape.gradient(loss, x)

    return side.strategy.run(replica_fn)


@case(49, op=OPS)
def all_reduce_gradient_of_variable(side: Side, op: str) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(context(side).all_reduce(op, v * v * (side.replica_id() + 1.0)))
        return tape.gradient(loss, v)

    return side.strategy.run(replica_fn)


@case(49)
def all_reduce_gradient_of_structure(side: Side) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        x, y = r + 1.0, r + 2.0
        with side.GradientTape() as tape:
            tape.watch([x, y])
            a, b = context(side).all_reduce("SUM", [x * x, y * y])
            loss = a * (r + 1.0) + 2.0 * b
        return tape.gradient(loss, [x, y])

    return side.strategy.run(replica_fn)


@case(49, op=OPS)
def gradients_all_reduced(side: Side, op: str) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(v * v) * (side.replica_id() + 1.0)
        return context(side).all_reduce(op, tape.gradient(loss, [v]))[0]

    return side.local(side.strategy.run(replica_fn))


# all_gather


@case(49, 51, on="S1 S2 S3 C2", axis=[0, -1])
def all_gather_vector(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        return context(side).all_gather(side.array([1.0, 2.0]) * (side.replica_id() + 1.0), axis=axis)

    return attempt(lambda: side.local(side.strategy.run(replica_fn)))


@case(51, on="S2 S3", axis=[0, 1, -1])
def all_gather_matrix(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        x = side.array([[1.0, 2.0], [3.0, 4.0]]) * (side.replica_id() + 1.0)
        return context(side).all_gather(x, axis=axis)

    return attempt(lambda: side.local(side.strategy.run(replica_fn)))


@case(51, axis=[0, 1, 2])
def all_gather_cube(side: Side, axis: int) -> Any:
    def replica_fn() -> Any:
        x = side.array([[[1.0, 2.0], [3.0, 4.0]]]) * (side.replica_id() + 1.0)
        return context(side).all_gather(x, axis=axis)

    return side.local(side.strategy.run(replica_fn))


@case(51, on="S2 S3", axis=[0, 1])
def all_gather_ragged(side: Side, axis: int) -> Any:
    rows = range(1, side.num_replicas + 1)
    values = [[[float(n)]] * n if axis == 0 else [[float(n)] * n] for n in rows]
    x = side.per_replica(values)
    return side.local(side.strategy.run(lambda x: context(side).all_gather(x, axis=axis), args=(x,)))


@case(51)
def all_gather_structure(side: Side) -> Any:
    def replica_fn() -> Any:
        x = side.stack([side.replica_id()])
        return context(side).all_gather({"a": x, "b": [x + 1.0]}, axis=0)

    return side.strategy.experimental_local_results(side.strategy.run(replica_fn))


@case(51, on="D")
def all_gather_by_default(side: Side) -> Any:
    return context(side).all_gather(side.array([1.0, 2.0]), axis=0)


@case(51, on="S1 S2 S3")
def all_gather_gradient(side: Side) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        x = side.array([1.0, 2.0]) * (r + 1.0)
        with side.GradientTape() as tape:
            tape.watch(x)
            y = context(side).all_gather(x, axis=0)
            loss = side.sum(y * y) * (r + 1.0)
        return tape.gradient(loss, x)

    return side.strategy.run(replica_fn)


@case(53, alone=True, what=["scalar", "indexed_slices", "axis"])
def all_gather_wrong(side: Side, what: str) -> Any:
    def replica_fn() -> Any:
        x = side.array([[1.0]])
        if what == "scalar":
            x = side.array(1.0)
        if what == "indexed_slices":
            x = side.indexed_slices(x, [0], [5, 1])
        return context(side).all_gather(x, axis=5 if what == "axis" else 0)

    return attempt(lambda: side.strategy.run(replica_fn))


@case(53, alone=True, what=["dimension", "rank"])
def all_gather_of_unequal_shapes(side: Side, what: str) -> Any:
    values = {"dimension": [[[1.0, 2.0]], [[1.0]]], "rank": [[[1.0, 2.0]], [1.0, 2.0]]}[what]

    def gather() -> Any:
        x = side.per_replica(values)
        return side.strategy.run(lambda x: context(side).all_gather(x, axis=0), args=(x,))

    return attempt(gather)


@case(0)
def collective_in_cross_replica_context(side: Side) -> Any:
    """There is no replica context: get_replica_context() is None in a scope."""
    with side.strategy.scope():
        return side.dist.get_replica_context()
