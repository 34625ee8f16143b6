"""Gradients that a parameter server holds, and the mean that it applies."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from exported import update_program
from replicax._ps.programs.averages import averaged
from replicax._ps.store import snapshots, unwritten
from replicax._ps.store.store import Store
from replicax._ps.store.updates import CompiledUpdate
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import InvalidArgumentError, MessageError, UnknownProgramError

ME = "me"
ZERO = np.zeros(4, np.float32)


class Server:
    """A store with a value "w", from which the mean of gradients is subtracted, and a value "count"."""

    def __init__(self, store=None):
        self.store = Store() if store is None else store
        self.store.hello(ME)
        described = {"shape": [4], "dtype": "float32", "initial": "array"}
        self.ask("create", [ZERO, ZERO], shards=[{"key": key, **described} for key in ("w", "count")])
        self.add_programs()

    def add_programs(self):
        program = update_program(lambda w, g: w - g, ["w"], [0], ZERO, ZERO)
        self.down = self.add(dataclasses.replace(program, averaged=("mean",)))
        self.up = self.add(update_program(lambda count: count + 1, ["count"], [0], ZERO))

    def ask(self, op, arrays=(), **header):
        return self.store.answer(Message({"op": op, "incarnation": ME, **header}, list(arrays)))

    def add(self, program):
        described = program.described()
        blob = np.frombuffer(program.blob, np.uint8)
        self.ask("program", [blob], digest=program.digest, described=described)
        return program.digest

    def push(self, closure, round_number, gradient, low=0):
        """Counts, and holds a gradient."""
        gradients = {"round": round_number, "program": self.down, "operands": 1}
        array = np.full(4, gradient, np.float32)
        header = {"closure": [ME, closure], "low": low, "program": self.up, "gradients": gradients}
        answer = self.ask("step", [array], **header)
        array[...] = np.nan  # the memory of a message is used again
        return answer

    def apply(self, round_number, closures, low=0):
        header = self.ask("apply", round=[ME, round_number], low=low, closures=closures).header
        return header["duplicate"]

    def values(self):
        answer = self.ask("step", closure=None, low=0, program=None, pull=[["w", None], ["count", None]])
        return [float(array[0]) for array in answer.arrays]


def test_mean_of_named_gradients_is_applied_once_and_the_rest_at_once():
    server = Server()
    server.push(0, 0, 2)
    server.push(1, 0, 100)
    assert server.values() == [0, 2]
    server.push(2, 0, 4)
    assert not server.apply(0, [0, 2])
    assert server.values() == [-3, 3]
    assert server.apply(0, [0, 2])  # asked again, for the answer was lost
    assert server.values() == [-3, 3]
    assert server.store.statistics()["gradient_bytes"] == 0


def test_late_gradients_are_dropped_and_repeated_ones_count_once():
    server = Server()
    server.push(0, 0, 2)
    server.push(0, 0, 50)  # of a closure that is run again: other data
    server.apply(0, [0])
    server.push(1, 0, 8)
    assert server.store.statistics()["gradient_bytes"] == 0
    assert server.values() == [-2, 2]
    server.push(1, 1, 6)  # it is in the next round instead, and was counted before
    server.apply(1, [1])
    assert server.values() == [-8, 2]


def test_rounds_that_ended_elsewhere_are_forgotten():
    server = Server()
    server.push(0, 0, 2)
    server.push(1, 1, 4)
    server.apply(1, [1], low=1)
    assert server.store.statistics()["gradient_bytes"] == 0
    server.push(2, 0, 2)
    assert server.store.statistics()["gradient_bytes"] == 0
    assert server.values()[0] == -4


def test_gradients_of_dropped_variables_are_dropped():
    server = Server()
    server.push(0, 0, 2)
    server.ask("drop", keys=["w"])
    assert server.store.statistics()["gradient_bytes"] == 0
    assert not server.apply(0, [0])  # no error: nobody waits for it


def test_round_that_fails_and_is_tried_again_has_the_same_mean(monkeypatch):
    server = Server()
    for closure, gradient in enumerate([2, 4, 6]):
        server.push(closure, 0, gradient)

    def no_memory(*_):
        raise MemoryError("Nothing was updated.")

    with monkeypatch.context() as patch:
        patch.setattr(CompiledUpdate, "__call__", no_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                server.apply(0, [0, 1, 2])
    assert not server.apply(0, [0, 1, 2])
    assert server.values() == [-4, 3]


def test_gradients_of_a_state_that_is_sent_to_another_server_outlive_their_round():
    server = Server()
    server.push(0, 0, 2)
    server.push(1, 0, 4)
    gradients = server.store.state().gradients
    server.apply(0, [0, 1])
    assert [float(arrays[0][0]) for _, _, _, arrays in gradients] == [2, 4]


def test_returning_server_applies_the_gradients_it_has(tmp_path):
    server = Server()
    server.push(0, 0, 2)
    server.store.snapshot(tmp_path)
    server.push(1, 0, 4)
    server.apply(0, [0, 1])
    server.push(2, 1, 8)
    assert server.store.restore(tmp_path)["programs"]
    with pytest.raises(UnknownProgramError):
        server.push(3, 1, 6)
    server.add_programs()
    assert server.values() == [0, 1]
    server.push(3, 1, 6)
    assert not server.apply(1, [2, 3])
    assert server.values() == [-6, 2]
    assert not server.apply(2, [4, 5])  # it has none of them
    assert server.values() == [-6, 2]


def test_round_waits_if_too_much_memory_would_be_doubled(tmp_path, monkeypatch):
    monkeypatch.setattr(unwritten, "_MIN_TWICE_BYTES", 0)
    server = Server()
    server.push(0, 0, 2)
    applying = threading.Thread(target=server.apply, args=[0, [0]])
    write_entry = snapshots.write_entry

    def write(file, number, entry):
        if entry.key == "w":
            applying.start()
            applying.join(timeout=0.5)
            assert applying.is_alive()
        elif applying.ident is not None:
            applying.join(timeout=30)
            assert not applying.is_alive()
        return write_entry(file, number, entry)

    monkeypatch.setattr(snapshots, "write_entry", write)
    server.store.snapshot(tmp_path)
    applying.join(timeout=30)
    assert server.values() == [-2, 1]


def test_gradients_that_do_not_fit_are_rejected_on_arrival():
    server = Server()
    gradients = {"round": 0, "program": server.down, "operands": 1}
    with pytest.raises(InvalidArgumentError, match=r"takes .*\(4,\).*, got .*\(5,\)"):
        server.ask("step", [np.zeros(5, np.float32)], closure=[ME, 0], program=server.up, gradients=gradients)
    assert server.values() == [0, 0]
    for wrong in ({**gradients, "operands": 2}, {**gradients, "operands": "1"}, {"round": 0}):
        with pytest.raises(MessageError):
            server.ask("step", [ZERO], closure=[ME, 0], gradients=wrong)
    for header in ({"closures": [0]}, {"round": [ME, 0]}):
        with pytest.raises(MessageError):
            server.ask("apply", **header)


# --- means ----------------------------------------------------------------------------------------------


def test_half_precision_is_summed_in_higher_precision():
    parts = [np.full(2, value, jnp.bfloat16) for value in [256, *[1] * 63]]
    (mean,) = averaged(["mean"], [((2,), jnp.bfloat16)], [[part] for part in parts])
    assert mean.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mean, np.full(2, (256 + 63) / 64, jnp.bfloat16))


def test_condition_holds_if_it_holds_for_all():
    spec = ((), np.dtype(bool))
    assert averaged(["all"], [spec], [[np.array(True)], [np.array(True)]])[0]
    assert not averaged(["all"], [spec], [[np.array(True)], [np.array(False)]])[0]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_averaged_like_full_tables(seed):
    rng = np.random.default_rng(seed)
    num_rows, room = 7, 18
    dense, sent = np.zeros((num_rows, 3)), []
    for num_ids in (6, 4, 6):
        ids = np.sort(rng.choice(num_rows, rng.integers(1, num_ids + 1), replace=False))
        numbers = np.full(num_ids, num_rows, np.int32)  # what is left is padding
        numbers[: len(ids)] = ids
        rows = rng.normal(size=(num_ids, 3)).astype(np.float32)
        rows[len(ids) :] = 0
        dense[ids] += rows[: len(ids)] / 3
        sent.append([numbers, rows])
    specs = [((room,), np.dtype(np.int32)), ((room, 3), np.dtype(np.float32))]
    numbers, rows = averaged(["rows"], specs, sent)
    assert (numbers.shape, rows.shape, numbers.dtype) == ((room,), (room, 3), np.int32)
    found = np.zeros((num_rows, 3))
    valid = (numbers >= 0) & (numbers < num_rows)
    assert len(set(numbers[valid])) == valid.sum()
    found[numbers[valid]] = rows[valid]
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-6)


def test_too_many_rows():
    specs = [((2,), np.dtype(np.int32)), ((2, 1), np.dtype(np.float32))]
    sent = [[np.int32([n]), np.float32([[n]])] for n in range(3)]
    with pytest.raises(InvalidArgumentError, match=r"3 rows of a table, .* room for 2"):
        averaged(["rows"], specs, sent)
