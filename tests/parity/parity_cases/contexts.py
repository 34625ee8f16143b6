"""Cases about scopes, contexts and the default strategy."""

import threading
from typing import Any

from parity_cases.observing import attempt, discard
from parity_cases.registry import case
from parity_cases.side import Side


def state(side: Side) -> dict[str, Any]:
    """The results of the functions that return the current context."""
    context = side.dist.get_replica_context()
    found = {
        "has_strategy": side.dist.has_strategy(),
        "in_cross_replica_context": side.dist.in_cross_replica_context(),
        "has_replica_context": context is not None,
        "num_replicas": side.dist.get_strategy().num_replicas_in_sync,
    }
    if context is not None:
        found["context_num_replicas"] = context.num_replicas_in_sync
    return found


@case(1, on="D")
def default_state(side: Side) -> Any:
    context = side.dist.get_replica_context()
    return {"state": state(side), "replica_id": int(context.replica_id_in_sync_group)}


@case(2, on="S1 S2 C2")
def scope_state(side: Side) -> Any:
    with side.strategy.scope() as entered:
        inside = state(side)
        current = side.dist.get_strategy() is side.strategy
    after = state(side)
    return {"inside": inside, "after": after, "as": entered is side.strategy, "current": current}


@case(0, on="S1 S2")
def state_in_run(side: Side) -> Any:
    seen = []

    def replica_fn() -> Any:
        seen.append(state(side))
        seen.append(side.dist.get_strategy() is side.strategy)
        return side.replica_id()

    ids = side.strategy.run(replica_fn)
    return {"state": seen[0], "current": seen[1], "ids": ids}


@case(3)
def same_scope_nests(side: Side) -> Any:
    first = side.strategy.scope()
    with first:
        with side.strategy.scope():
            with first:
                inside = state(side)
        again = state(side)
    return {"inside": inside, "again": again, "after": state(side)}


@case(4)
def other_scope_does_not_nest(side: Side) -> Any:
    def nest() -> None:
        with side.strategy.scope(), side.make_strategy("S3").scope():
            pass

    return {"nested": attempt(nest), "after": state(side)}


@case(4)
def other_strategys_run_in_scope(side: Side) -> Any:
    def nest() -> Any:
        with side.strategy.scope():
            return side.make_strategy("S3").run(side.replica_id)

    return {"nested": attempt(nest), "after": state(side)}


@case(5, alone=True)
def set_strategy(side: Side) -> Any:
    default, second, third = side.dist.get_strategy(), side.strategy, side.make_strategy("S3")
    seen = []
    for chosen in (second, third, None):
        side.dist.experimental_set_strategy(chosen)
        seen.append(side.dist.get_strategy() is (chosen or default))
    return {"current": seen, "after": state(side)}


@case(5, alone=True, to=["other", "none"])
def set_strategy_in_scope(side: Side, to: str) -> Any:
    with side.strategy.scope():
        other = side.make_strategy("S3") if to == "other" else None
        return attempt(lambda: side.dist.experimental_set_strategy(other))


@case(5, alone=True)
def set_strategy_is_used(side: Side) -> Any:
    side.dist.experimental_set_strategy(side.strategy)
    try:
        inside = state(side)
        v = side.Variable(1.0)
        return {"state": inside, "num_components": len(side.local(v))}
    finally:
        side.dist.experimental_set_strategy(None)


@case(6)
def default_scope_in_scope(side: Side) -> Any:
    default = side.make_strategy("D")

    def nest() -> None:
        with side.strategy.scope(), default.scope():
            pass

    return attempt(nest)


@case(6, on="D")
def default_scope_alone(side: Side) -> Any:
    with side.strategy.scope():
        return state(side)


@case(7)
def scope_in_default_scope(side: Side) -> Any:
    default = side.make_strategy("D")

    def nest() -> None:
        with default.scope(), side.strategy.scope():
            side.Variable(1.0)

    return attempt(nest)


@case(8, on="D")
def default_merge_call(side: Side) -> Any:
    seen = []

    def merge_fn(strategy: Any, text: str) -> str:
        seen.append(strategy is side.strategy)
        seen.append(side.dist.in_cross_replica_context())
        return "foo_" + text

    text = side.dist.get_replica_context().merge_call(merge_fn, args=("bar",))
    return {"text": text, "seen": seen}


@case(9, on="D", size=[12, 13])
def input_context_batch_size(side: Side, size: int) -> Any:
    context = side.dist.InputContext(2, 1, 6)
    return attempt(lambda: context.get_per_replica_batch_size(size))


@case(9, on="D")
def input_context_fields(side: Side) -> Any:
    context = side.dist.InputContext(3, 1, 42)
    fields = ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync")
    default = side.dist.InputContext()
    return {
        "given": [getattr(context, name) for name in fields],
        "default": [getattr(default, name) for name in fields],
    }


@case(9, on="D")
def input_context_text(side: Side) -> Any:
    return str(side.dist.InputContext(3, 1, 42))


@case(0)
def thread_in_scope_sees_no_strategy(side: Side) -> Any:
    seen = []
    with side.strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(state(side)))
        thread.start()
        thread.join()
    return seen[0]


@case(0)
def scope_in_run(side: Side) -> Any:
    def replica_fn() -> Any:
        with side.strategy.scope():
            return side.replica_id()

    return {"run": attempt(lambda: side.strategy.run(replica_fn)), "after": state(side)}


@case(0)
def run_in_run(side: Side) -> Any:
    def replica_fn() -> Any:
        return side.strategy.run(side.replica_id)

    return {"run": attempt(lambda: side.strategy.run(replica_fn)), "after": state(side)}


@case(0)
def function_traced_in_scope(side: Side) -> Any:
    seen = []

    @side.function
    def traced() -> Any:
        seen.append(state(side))
        return side.array(1.0)

    with side.strategy.scope():
        traced()
    return seen[0]


@case(0, how=["read", "assign"])
def variable_in_other_scope(side: Side, how: str) -> Any:
    v = side.variable(1.0)
    with side.make_strategy("S3").scope():
        if how == "read":
            return attempt(lambda: side.read(v))
        return attempt(lambda: discard(v.assign(2.0)))


@case(0)
def created_in_scope(side: Side) -> Any:
    outside = side.Variable(1.0)
    inside = side.variable(1.0)
    created = side.strategy.extended.variable_created_in_scope
    return {"outside": created(outside), "inside": created(inside)}


@case(0, on="D", which=["worker_devices", "parameter_devices"])
def default_devices(side: Side, which: str) -> Any:
    return attempt(lambda: len(getattr(side.strategy.extended, which)))


@case(0, on="S1 S2 S3 C2")
def devices(side: Side) -> Any:
    extended = side.strategy.extended
    return {
        "workers": len(extended.worker_devices),
        "parameters": len(extended.parameter_devices),
        "replicas": side.strategy.num_replicas_in_sync,
    }


@case(0)
def duplicate_devices(side: Side) -> Any:
    return attempt(lambda: discard(side.dist.MirroredStrategy([side.device(0)] * 2)))


@case(0, on="D")
def unknown_device(side: Side) -> Any:
    return attempt(lambda: discard(side.dist.MirroredStrategy(["cpu:0", "nonsense:7"])))


@case(0, on="D S1 S2 C2")
def cluster_resolver(side: Side) -> Any:
    return side.strategy.cluster_resolver


@case(0)
def reduce_op_names(side: Side) -> Any:
    return sorted(op.name for op in side.dist.ReduceOp)
