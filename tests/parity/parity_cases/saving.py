"""Cases about checkpoints: names of saved objects, per-replica values, objects missing on one side, and managers."""

import tempfile
from typing import Any

from parity_cases.observing import attempt, discard
from parity_cases.registry import case
from parity_cases.side import Side

ASSERTIONS = ["assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"]


@case(46, agg=["SUM", "MEAN", "ONLY_FIRST_REPLICA"], dtype=["float32"])
@case(46, agg=["SUM", "ONLY_FIRST_REPLICA"], dtype=["int32"])
def on_as_many_replicas(side: Side, agg: str, dtype: str) -> Any:
    """Components (3, 4) are restored onto two replicas."""
    v = side.variable(side.array(0, dtype), "ON_READ", agg)
    own = side.to_int if dtype == "int32" else side.to_float
    side.strategy.run(lambda: discard(v.assign(own(side.replica_id()) + side.array(3, dtype))))
    with tempfile.TemporaryDirectory() as folder:
        path = side.save(folder + "/saved", v)
        v.assign(side.array(0, dtype))
        side.restore(path, v)
    return {"components": side.components(v), "read": side.read(v)}


@case(46, agg=["SUM", "ONLY_FIRST_REPLICA"])
def integer_of_others(side: Side, agg: str) -> Any:
    """5, saved from one variable, onto two replicas."""
    v = side.variable(side.array(0, "int32"), "ON_READ", agg)
    with tempfile.TemporaryDirectory() as folder:
        side.restore(side.save(folder + "/saved", side.Variable(side.array(5, "int32"))), v)
    return {"components": side.components(v), "read": side.read(v)}


@case(47, on="D S2")
def names_of_nests(side: Side) -> Any:
    """Attributes, positions and keys, for any names of variables; an object that appears twice is saved once."""
    one, two = side.variable(1.0), side.variable(2.0)
    inner = side.checkpoint(first=one, again=one)
    with tempfile.TemporaryDirectory() as folder:
        path = side.checkpoint(inner=inner, many=[two, {"key": side.variable(3.0)}]).save(folder + "/saved")
        return side.saved_keys(path)


@case(47, asserted=ASSERTIONS)
def no_path(side: Side, asserted: str) -> Any:
    """``restore(manager.latest_checkpoint)`` in the first run of a program, without a checkpoint."""
    v = side.variable(1.0)
    status = side.checkpoint(v=v).restore(None)
    discard(status.expect_partial())
    return [side.read(v), attempt(lambda: discard(getattr(status, asserted)()))]


@case(47, asserted=ASSERTIONS, saved=["more", "less", "other"])
def on_one_side(side: Side, asserted: str, saved: str) -> Any:
    """The checkpoint has more objects than the program, fewer, or other ones."""
    v, w = side.variable(1.0), side.variable(2.0)
    of_saved = {"more": {"v": v, "w": w}, "less": {"v": v}, "other": {"w": w}}[saved]
    here = {"more": {"v": v}, "less": {"v": v, "w": w}, "other": {"v": v}}[saved]
    with tempfile.TemporaryDirectory() as folder:
        path = side.checkpoint(**of_saved).save(folder + "/saved")
        v.assign(5.0)
        w.assign(6.0)

        def restore() -> None:
            status = side.checkpoint(**here).restore(path)
            try:
                discard(getattr(status, asserted)())
            finally:
                discard(status.expect_partial())

        outcome = attempt(restore)
    return [side.read(v), side.read(w), outcome]


@case(47, now=["same", "more", "less", "other"])
def managed(side: Side, now: str) -> Any:
    """``restore_or_initialize`` with the same objects, more, fewer, or another name."""
    v, w = side.variable(1.0), side.variable(2.0)
    saved = {"v": v, "w": w} if now == "less" else {"v": v}
    here = {"same": {"v": v}, "more": {"v": v, "w": w}, "less": {"v": v}, "other": {"w": v}}[now]
    with tempfile.TemporaryDirectory() as folder:
        first = side.checkpoint_manager(side.checkpoint(**saved), folder)
        discard(first.save(), first.latest_checkpoint)
        manager = side.checkpoint_manager(side.checkpoint(**here), folder)
        v.assign(5.0)
        w.assign(6.0)
        found = attempt(lambda: manager.restore_or_initialize() is not None)
        return [found, side.read(v), side.read(w)]


@case(47)
def counted(side: Side) -> Any:
    """Numbers continue after restoring; two checkpoints are kept."""
    v = side.variable(1.0)
    with tempfile.TemporaryDirectory() as folder:
        manager = side.checkpoint_manager(side.checkpoint(v=v), folder)
        first = [
            manager.restore_or_initialize(),
            *(manager.save() for _ in range(3)),
            manager.latest_checkpoint,
        ]
        again = side.checkpoint_manager(side.checkpoint(v=v), folder)
        discard(again.restore_or_initialize())
        paths = [*first[1:], again.save(), again.latest_checkpoint]
        return [first[0], *(path.rpartition("/")[2] for path in paths)]
