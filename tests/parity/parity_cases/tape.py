"""Cases about ``GradientTape`` in replica functions."""

from collections.abc import Callable
from typing import Any

from parity_cases.observing import attempt
from parity_cases.registry import case
from parity_cases.side import Side

ONE_AND_TWO = "S1 S2"


def in_replicas(side: Side, fn: Callable[..., Any], *args: Any) -> Any:
    return side.strategy.run(fn, args=args)


@case(on=ONE_AND_TWO)
def variable(side: Side) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(v * v) * (side.replica_id() + 1.0)
        return tape.gradient(loss, v)

    return in_replicas(side, replica_fn)


@case(on=ONE_AND_TWO)
def watched_array(side: Side) -> Any:
    def replica_fn() -> Any:
        x = side.replica_id() + 3.0
        with side.GradientTape() as tape:
            tape.watch(x)
            y = x * x * x
        return tape.gradient(y, x)

    return in_replicas(side, replica_fn)


@case(on=ONE_AND_TWO)
def argument_watched(side: Side) -> Any:
    def replica_fn(x: Any) -> Any:
        with side.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x)

    return in_replicas(side, replica_fn, side.per_replica([[1.0, 2.0], [3.0, 4.0]]))


@case(on=ONE_AND_TWO)
def unwatched_array(side: Side) -> Any:
    def replica_fn() -> Any:
        x = side.replica_id() + 3.0
        with side.GradientTape() as tape:
            y = x * x
        return tape.gradient(y, x)

    return in_replicas(side, replica_fn)


@case()
def watched_after_use(side: Side) -> Any:
    def replica_fn() -> Any:
        x = side.replica_id() + 3.0
        with side.GradientTape() as tape:
            y = x * x
            tape.watch(x)
            z = x * 5.0
        return tape.gradient([y, z], x)

    return in_replicas(side, replica_fn)


@case()
def watch_list(side: Side) -> Any:
    def replica_fn() -> Any:
        x, y = side.replica_id() + 1.0, side.replica_id() + 2.0
        with side.GradientTape() as tape:
            tape.watch([x, y])
            z = x * x * y
        return tape.gradient(z, [x, y])

    return in_replicas(side, replica_fn)


@case(on=ONE_AND_TWO)
def structure_of_sources(side: Side) -> Any:
    v, w = side.variable(2.0), side.variable([3.0, 4.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = v * side.sum(w * w) * (side.replica_id() + 1.0)
        return tape.gradient(loss, {"v": v, "more": [w]})

    return in_replicas(side, replica_fn)


@case()
def same_source_twice(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, [v, v])

    return in_replicas(side, replica_fn)


@case()
def several_targets(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            a, b = v * v, v * 5.0
        return tape.gradient([a, b], v)

    return in_replicas(side, replica_fn)


@case()
def structure_of_targets(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            a, b = v * v, v * 5.0
        return tape.gradient({"a": a, "b": b}, v)

    return in_replicas(side, replica_fn)


@case()
def same_target_twice(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            a = v * v
        return tape.gradient([a, a], v)

    return in_replicas(side, replica_fn)


@case()
def target_of_rank_two(side: Side) -> Any:
    v = side.variable([[1.0, 2.0], [3.0, 4.0]])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v * v
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def output_gradients(side: Side) -> Any:
    v = side.variable([1.0, 2.0, 3.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        weights = side.array([1.0, 0.0, 10.0]) * (side.replica_id() + 1.0)
        return tape.gradient(y, v, output_gradients=weights)

    return in_replicas(side, replica_fn)


@case()
def output_gradients_of_several_targets(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            a, b = v * v, v * 5.0
        return tape.gradient([a, b], v, output_gradients=[side.array(2.0), side.array(3.0)])

    return in_replicas(side, replica_fn)


@case(unconnected=["none", "zero"])
def unconnected(side: Side, unconnected: str) -> Any:
    v, w = side.variable([1.0, 2.0]), side.variable([[3.0, 4.0]])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(v * v)
        return tape.gradient(loss, [v, w], unconnected_gradients=unconnected)

    return in_replicas(side, replica_fn)


@case(unconnected=["none", "zero"])
def unconnected_target(side: Side, unconnected: str) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            discarded = v * v
            constant = side.array(5.0)
        del discarded
        return tape.gradient(constant, v, unconnected_gradients=unconnected)

    return in_replicas(side, replica_fn)


@case()
def unconnected_wrong(side: Side) -> Any:
    v = side.variable(1.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, v, unconnected_gradients="nonsense")

    return attempt(lambda: in_replicas(side, replica_fn))


@case()
def zero_times_is_connected(side: Side) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(v * 0.0)
        return tape.gradient(loss, v)

    return in_replicas(side, replica_fn)


@case()
def stop_gradient(side: Side) -> Any:
    v, w = side.variable(2.0), side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            loss = v * v + side.stop_gradient(w * w) + side.stop_gradient(v + 0.0) * v
        return tape.gradient(loss, [v, w])

    return in_replicas(side, replica_fn)


@case()
def target_is_the_source(side: Side) -> Any:
    def replica_fn() -> Any:
        x = side.replica_id() + 3.0
        with side.GradientTape() as tape:
            tape.watch(x)
        return tape.gradient(x, x)

    return in_replicas(side, replica_fn)


@case()
def intermediate_source(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
            z = y * y
        return tape.gradient(z, [y, v])

    return in_replicas(side, replica_fn)


@case(on=ONE_AND_TWO)
def nested(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as outer:
            with side.GradientTape() as inner:
                y = v * v * v * (side.replica_id() + 1.0)
            first = inner.gradient(y, v)
        return first, outer.gradient(first, v)

    return in_replicas(side, replica_fn)


@case()
def nested_gradient_penalty(side: Side) -> Any:
    v = side.variable([1.0, 2.0])

    def replica_fn(x: Any) -> Any:
        with side.GradientTape() as outer:
            with side.GradientTape() as inner:
                inner.watch(x)
                y = side.sum(v * v * x * x)
            penalty = side.sum(inner.gradient(y, x) ** 2)
            loss = y + penalty
        return outer.gradient(loss, v)

    return in_replicas(side, replica_fn, side.per_replica([[1.0, 2.0], [3.0, 4.0]]))


@case()
def two_tapes_at_once(side: Side) -> Any:
    v, w = side.variable(2.0), side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as first, side.GradientTape() as second:
            shared = v * w
            a, b = shared * v, shared * w
        return first.gradient(a, [v, w]), second.gradient(b, [v, w])

    return in_replicas(side, replica_fn)


@case()
def persistent(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape(persistent=True) as tape:
            y = v * v
            z = y * y
        return tape.gradient(y, v), tape.gradient(z, v), tape.gradient(z, y)

    return in_replicas(side, replica_fn)


@case()
def gradient_twice_without_persistent(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v), tape.gradient(y, v)

    return attempt(lambda: in_replicas(side, replica_fn))


@case()
def gradient_inside_the_tape(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape(persistent=True) as tape:
            y = v * v
            inside = tape.gradient(y, v)
            z = inside * v
        return inside, tape.gradient(z, v)

    return in_replicas(side, replica_fn)


@case()
def before_the_tape_is_not_recorded(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        y = v * 2.0
        with side.GradientTape() as tape:
            z = y * y
        return tape.gradient(z, v)

    return in_replicas(side, replica_fn)


@case()
def before_the_tape_partly(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        y = v * 2.0
        with side.GradientTape() as tape:
            z = y * v
        return tape.gradient(z, v)

    return in_replicas(side, replica_fn)


@case()
def after_the_tape_is_not_recorded(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        z = y * 7.0
        return tape.gradient(z, v)

    return in_replicas(side, replica_fn)


@case()
def stop_recording(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
            with tape.stop_recording():
                z = v * 5.0
            loss = y + z * v
        return tape.gradient(loss, v)

    return in_replicas(side, replica_fn)


@case()
def reset(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn() -> Any:
        with side.GradientTape(persistent=True) as tape:
            y = v * v
            tape.reset()
            z = v * 5.0
        return tape.gradient(y, v), tape.gradient(z, v)

    return in_replicas(side, replica_fn)


@case()
def not_trainable(side: Side) -> Any:
    v = side.variable(3.0, trainable=False)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def not_trainable_but_watched(side: Side) -> Any:
    v = side.variable(3.0, trainable=False)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            tape.watch(v)
            y = v * v
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def watches_no_variables(side: Side) -> Any:
    v, w = side.variable(3.0), side.variable(4.0)

    def replica_fn() -> Any:
        with side.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(v)
            y = v * w
        return tape.gradient(y, [v, w])

    return in_replicas(side, replica_fn)


@case()
def watched_variables(side: Side) -> Any:
    v, w = side.variable(3.0, name="v"), side.variable(4.0, name="w")
    side.variable(5.0, name="not_read")
    seen = []

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v * w
        seen.append([x.name.removesuffix(":0").partition("/")[0] for x in tape.watched_variables()])
        return y

    in_replicas(side, replica_fn)
    return seen[0]


@case()
def through_an_assignment(side: Side) -> Any:
    """x is assigned to v inside the tape: v's value is a new source, and x is not connected to it."""
    v = side.variable(1.0)

    def replica_fn() -> Any:
        x = side.array(3.0)
        with side.GradientTape() as tape:
            tape.watch(x)
            v.assign(x * 2.0)
            y = v * v
        return tape.gradient(y, [x, v])

    return {"out": in_replicas(side, replica_fn), "components": side.components(v)}


@case()
def through_the_result_of_an_assignment(side: Side) -> Any:
    v = side.variable(1.0)

    def replica_fn() -> Any:
        x = side.array(3.0)
        with side.GradientTape() as tape:
            tape.watch(x)
            y = v.assign(x * 2.0) * 5.0
        return tape.gradient(y, [x, v])

    return in_replicas(side, replica_fn)


@case()
def reads_around_an_assignment(side: Side) -> Any:
    """v is 1 when first read and 2 when read again; both reads count."""
    v = side.variable(1.0)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            first = v * v
            v.assign_add(1.0)
            second = v * v
            loss = first + second
        return tape.gradient(loss, v)

    return {"out": in_replicas(side, replica_fn), "components": side.components(v)}


@case(0, agg=["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def around_an_aggregated_assignment(side: Side, agg: str) -> Any:
    v = side.variable(1.0, agg=agg)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            first = v * v
            v.assign_add(side.replica_id() + 1.0)
            loss = first + v * v
        return tape.gradient(loss, v)

    return {"out": in_replicas(side, replica_fn), "components": side.components(v)}


@case()
def integer_source(side: Side) -> Any:
    v = side.variable(3, dtype="int32")

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            tape.watch(v)
            y = side.to_float(v) * 2.0
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def integer_on_the_way(side: Side) -> Any:
    v = side.variable(3.5)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = side.to_float(side.to_int(v)) * v
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def integer_target(side: Side) -> Any:
    v = side.variable(3.5)

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = side.to_int(v * 2.0)
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def indexing(side: Side) -> Any:
    v = side.variable([1.0, 2.0, 3.0])

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = v[0] * v[2]
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case()
def nested_function_in_tape(side: Side) -> Any:
    v = side.variable(3.0)

    @side.nested_function
    def square(x: Any) -> Any:
        return x * x

    def replica_fn() -> Any:
        with side.GradientTape() as tape:
            y = square(v * (side.replica_id() + 1.0))
        return tape.gradient(y, v)

    return in_replicas(side, replica_fn)


@case(on="S1 S2 C2")
def in_function(side: Side) -> Any:
    v = side.variable(3.0)

    def replica_fn(x: Any) -> Any:
        with side.GradientTape() as tape:
            y = side.sum(v * v * x)
        return tape.gradient(y, v)

    @side.function
    def step(x: Any) -> Any:
        return side.strategy.run(replica_fn, args=(x,))

    return step(side.per_replica([[1.0, 2.0], [3.0, 4.0]]))


@case(on="S1 S2 C2")
def plain_descent(side: Side) -> Any:
    """Gradients summed by hand and subtracted."""
    v = side.variable([1.0, 2.0])

    def replica_fn(x: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(v * v * x)
        gradient = side.dist.get_replica_context().all_reduce("SUM", tape.gradient(loss, v))
        side.dist.get_replica_context().merge_call(
            lambda strategy, g: strategy.extended.update(v, lambda v, g: v.assign_sub(0.1 * g), args=(g,)),
            args=(gradient,),
        )
        return loss

    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    losses = [side.local(side.strategy.run(replica_fn, args=(x,))) for _ in range(2)]
    return {"losses": losses, "components": side.components(v)}


@case(on="D")
def outside_run(side: Side) -> Any:
    v = side.Variable(3.0)

    def gradient() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    return attempt(gradient)


@case(on="D")
def outside_run_in_function(side: Side) -> Any:
    v = side.Variable(3.0)

    @side.function
    def gradient() -> Any:
        with side.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    return gradient()
