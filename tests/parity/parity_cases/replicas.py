"""Cases about ``run``: arguments, results, local results, merge_call, values made per replica."""

from typing import Any

from parity_cases.observing import attempt, discard
from parity_cases.registry import case
from parity_cases.side import Side


@case(19, on="S1 S2 C2")
def selects_arguments(side: Side) -> Any:
    x = side.per_replica([1.0, 2.0])
    return side.strategy.run(lambda x, y: x + y, args=(x,), kwargs={"y": 1.0})


@case(19)
def selects_in_nested_arguments(side: Side) -> Any:
    x = side.per_replica([1.0, 2.0])
    plain = side.array([10.0, 20.0])

    def replica_fn(nest: Any, *, more: Any) -> Any:
        return nest["a"][0] + nest["a"][1] * more["b"]

    return side.strategy.run(replica_fn, args=({"a": (x, plain)},), kwargs={"more": {"b": x}})


@case(19)
def variables_pass_through(side: Side) -> Any:
    v = side.variable(3.0)
    seen = []

    def replica_fn(got: Any) -> Any:
        seen.append(got is v)
        return got * (side.replica_id() + 1.0)

    out = side.strategy.run(replica_fn, args=(v,))
    return {"same_object": all(seen), "out": out}


@case(20, on="S1 S2 S3 S4 C2")
def constant_input(side: Side) -> Any:
    out = side.strategy.run(lambda x: x * x, args=(side.array(2.0),))
    return side.local(out)


@case(20)
def array_input_is_whole_on_each_replica(side: Side) -> Any:
    return side.strategy.run(lambda x: x * (side.replica_id() + 1.0), args=(side.array([1.0, 2.0, 3.0]),))


@case(21, on="S1 S2", args=["int", "array"])
def arguments_must_be_a_sequence(side: Side, args: str) -> Any:
    value = 3 if args == "int" else side.array([1.0, 2.0])
    return attempt(lambda: side.strategy.run(lambda x: x, args=value))


@case(21)
def arguments_as_list(side: Side) -> Any:
    return side.strategy.run(lambda x, y: x + y + side.replica_id(), args=[1.0, 2.0])


@case(21)
def no_arguments(side: Side) -> Any:
    return side.strategy.run(side.replica_id, kwargs=None)


@case(22, on="S1 S2 C2", value=[None, 7, 2.5, "text", True])
def python_results_come_bare(side: Side, value: Any) -> Any:
    return side.strategy.run(lambda: value)


@case(22)
def mixed_results(side: Side) -> Any:
    return side.strategy.run(lambda: {"none": None, "seven": 7, "id": side.replica_id()})


@case(22)
def returned_variable(side: Side) -> Any:
    v = side.variable(3.0)
    return [side.read(x) for x in side.local(side.strategy.run(lambda: v))]


@case(22, where=["closure", "argument"])
def returned_array_that_is_the_same(side: Side, where: str) -> Any:
    x = side.array([1.0, 2.0])
    if where == "closure":
        return side.local(side.strategy.run(lambda: x))
    return side.local(side.strategy.run(lambda x: x, args=(x,)))


@case(23, on="S1 S2", what=["dict", "list", "tuple", "number", "none"])
def local_results_of_plain_values(side: Side, what: str) -> Any:
    value = {
        "dict": {"a": 1.0, "b": 2.0},
        "list": [1, 2],
        "tuple": (1, 2),
        "number": 3.0,
        "none": None,
    }[what]
    return side.strategy.experimental_local_results(value)


@case(23, on="S1 S2")
def local_results_of_constants_returned(side: Side) -> Any:
    out = side.strategy.run(lambda: {"a": 1.0, "b": 2.0})
    return side.strategy.experimental_local_results(out)


@case(23, on="S1 S2 S3 C2")
def local_results_of_structure(side: Side) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        return {"a": r + 1.0, "b": r + 2.0}

    return side.strategy.experimental_local_results(side.strategy.run(replica_fn))


@case(23, on="S1 S2 C2")
def local_results_of_nested_structure(side: Side) -> Any:
    def replica_fn() -> Any:
        r = side.replica_id()
        return [r, {"b": (r + 2.0, r + 3.0)}]

    return side.strategy.experimental_local_results(side.strategy.run(replica_fn))


@case(23, on="S1 S2 S3")
def local_results_of_array(side: Side) -> Any:
    return side.strategy.experimental_local_results(side.strategy.run(side.replica_id))


@case(23, on="S1 S2")
def local_results_of_plain_array(side: Side) -> Any:
    return side.strategy.experimental_local_results(side.array([1.0, 2.0]))


@case(24)
def nested_output(side: Side) -> Any:
    steps = []
    for rows in ([[0.0], [1.0]], [[2.0], [3.0]]):
        x = side.per_replica(rows)
        out = side.strategy.run(lambda x: [{"a": x - 1.0, "b": x + 1.0}], args=(x,))
        steps.append({key: side.local(out[0][key]) for key in ("a", "b")})
    return steps


@case(25, on="S1 S2 C2", error=["ValueError", "KeyError", "ZeroDivisionError"])
def exception_in_replica(side: Side, error: str) -> Any:
    kind = {"ValueError": ValueError, "KeyError": KeyError, "ZeroDivisionError": ZeroDivisionError}

    def replica_fn() -> Any:
        raise kind[error]("mine")

    raised = attempt(lambda: side.strategy.run(replica_fn))
    after = side.strategy.run(side.replica_id)
    return {
        "raised": raised,
        "has_strategy": side.dist.has_strategy(),
        "in_cross_replica_context": side.dist.in_cross_replica_context(),
        "next_run": after,
    }


@case(25)
def exception_in_merge_call(side: Side) -> Any:
    def merge_fn(strategy: Any) -> Any:
        raise ZeroDivisionError("mine")

    def replica_fn() -> Any:
        return side.dist.get_replica_context().merge_call(merge_fn)

    raised = attempt(lambda: side.strategy.run(replica_fn))
    return {"raised": raised, "has_strategy": side.dist.has_strategy()}


@case(27, on="D S1 S2 S3 C2")
def values_from_function(side: Side) -> Any:
    return side.strategy.experimental_distribute_values_from_function(
        lambda context: side.array(float(context.num_replicas_in_sync))
    )


@case(27, on="S2")
def values_from_function_python_numbers(side: Side) -> Any:
    values = side.strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    return side.local(values)


@case(27, on="S1 S2 C2")
def values_from_function_structure(side: Side) -> Any:
    return side.strategy.experimental_distribute_values_from_function(
        lambda context: {
            "x": side.array(float(context.replica_id_in_sync_group)),
            "y": [side.array([1.0] * 2)],
        }
    )


@case(27)
def values_from_function_ragged(side: Side) -> Any:
    x = side.per_replica([[1.0, 2.0, 3.0], [4.0]])
    return side.strategy.run(lambda x: x * 2.0, args=(x,))


@case(0)
def values_used_outside_replicas(side: Side) -> Any:
    x = side.per_replica([1.0, 2.0])
    return attempt(lambda: side.tanh(x))


@case(29, on="S1 S2 S3 C2")
def merge_call_identity(side: Side) -> Any:
    def replica_fn() -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(lambda strategy, x: x, args=(side.replica_id() + 1.0,))

    return side.strategy.run(replica_fn)


@case(29)
def merge_call_context(side: Side) -> Any:
    seen = []

    def merge_fn(strategy: Any, literal: float, *, more: str) -> Any:
        seen.append(strategy is side.strategy)
        seen.append(side.dist.in_cross_replica_context())
        seen.append(side.dist.get_replica_context() is None)
        seen.extend([literal, more])

    def replica_fn() -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(merge_fn, args=(5.0,), kwargs={"more": "text"})

    out = side.strategy.run(replica_fn)
    return {"seen": seen[-5:], "out": out}  # a function may be traced more than once


@case(29, on="S1 S2 S3", op=["SUM", "MEAN"])
def merge_call_reduces(side: Side, op: str) -> Any:
    def replica_fn() -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(
            lambda strategy, x: strategy.reduce(op, x, axis=None), args=(side.replica_id() + 1.0,)
        )

    return side.local(side.strategy.run(replica_fn))


@case(29, op=["SUM", "MEAN"])
def merge_call_reduces_over_axis(side: Side, op: str) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])

    def replica_fn(x: Any) -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(lambda s, x: s.reduce(op, x, axis=0), args=(x,))

    return side.local(side.strategy.run(replica_fn, args=(x,)))


@case(29)
def merge_call_gathers(side: Side) -> Any:
    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])

    def replica_fn(x: Any) -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(lambda s, x: s.gather(x, axis=0), args=(x,))

    return side.local(side.strategy.run(replica_fn, args=(x,)))


@case(29, on="S1 S2 C2")
def merge_call_updates(side: Side) -> Any:
    v = side.variable(10.0)

    def merge_fn(strategy: Any, x: Any) -> Any:
        total = strategy.reduce("SUM", x, axis=None)
        strategy.extended.update(v, lambda v, total: v.assign_sub(total), args=(total,))

    def replica_fn() -> Any:
        side.dist.get_replica_context().merge_call(merge_fn, args=(side.replica_id() + 1.0,))
        return v + 0.0

    out = side.strategy.run(replica_fn)
    return {"out": side.local(out), "components": side.components(v)}


@case(29)
def merge_call_local_results(side: Side) -> Any:
    def merge_fn(strategy: Any, x: Any) -> Any:
        first, second = strategy.experimental_local_results(x)
        return first * 10.0 + second

    def replica_fn() -> Any:
        context = side.dist.get_replica_context()
        return context.merge_call(merge_fn, args=(side.replica_id() + 1.0,))

    return side.local(side.strategy.run(replica_fn))


@case(29, alone=True)
def merge_call_in_nested_function(side: Side) -> Any:
    def replica_fn() -> Any:
        @side.nested_function
        def inner(x: Any) -> Any:
            context = side.dist.get_replica_context()
            return context.merge_call(lambda s, x: s.reduce("SUM", x, axis=None), args=(x,))

        return inner(side.replica_id() + 1.0)

    return attempt(lambda: side.local(side.strategy.run(replica_fn)))


@case(29, on="S1 S2 C2")
def run_and_reduce_in_function(side: Side) -> Any:
    v = side.variable(0.0, agg="SUM")

    @side.function
    def step(x: Any) -> Any:
        out = side.strategy.run(lambda x: v.assign_add(side.sum(x)) + 0.0, args=(x,))
        return side.strategy.reduce("SUM", out, axis=None)

    x = side.per_replica([[1.0, 2.0], [3.0, 4.0]])
    sums = [step(x), step(x)]
    return {"sums": sums, "components": side.components(v)}


@case(0)
def run_twice_in_function(side: Side) -> Any:
    v = side.variable(1.0, agg="MEAN")

    @side.function
    def step() -> Any:
        side.strategy.run(lambda: discard(v.assign_add(side.replica_id())))
        return side.strategy.run(lambda: v * (side.replica_id() + 1.0))

    return {"out": [step(), step()], "components": side.components(v)}
