"""A parameter server's store and its requests, in one process, without a transport."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store import store as store_module
from replicax._ps.store import updates as updates_module
from replicax._ps.store import window
from replicax._ps.store.held_shards import MAX_COPIED_BYTES
from replicax._ps.store.held_values import BYTES_PER_BLOCK, copied
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
    MessageError,
    UnavailableError,
    UnknownProgramError,
)

ME = "me"


def program_of(fn, keys, written, *inputs):
    """An update program of ``fn(*state, *operands)``; inputs are arrays like the state's and the operands'."""
    avals = [jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in inputs]
    blob = export.export(jax.jit(fn), platforms=["cpu"])(*avals).serialize()
    return UpdateProgram(bytes(blob), tuple(keys), tuple(written))


class Client:
    """Sends a store the message of a worker."""

    def __init__(self, store, incarnation=ME):
        self.store = store
        self.incarnation = incarnation

    def ask(self, op, arrays=(), **header):
        return self.store.answer(Message({"op": op, "incarnation": self.incarnation, **header}, list(arrays)))

    def create(self, **values):
        described = [
            {"key": key, "shape": list(value.shape), "dtype": value.dtype.name, "initial": "array"}
            for key, value in values.items()
        ]
        return self.ask("create", values.values(), shards=described)

    def add_program(self, program):
        blob = np.frombuffer(program.blob, np.uint8)
        self.ask("program", [blob], digest=program.digest, described=program.described())
        return program.digest

    def add(self, fn, keys, written, *inputs):
        return self.add_program(program_of(fn, keys, written, *inputs))

    def step(self, program=None, operands=(), closure=None, low=0, pull=(), rows=None, **more):
        rows = rows or {}
        closure = closure if closure is None or isinstance(closure, list) else [ME, closure]
        header = {"closure": closure, "low": low, "program": program, "pull": list(pull), "rows": list(rows)}
        return self.ask("step", [*operands, *rows.values()], **header, **more)

    def read(self, *keys):
        return [value.copy() for value in self.step(pull=[[key, None] for key in keys]).arrays]


@pytest.fixture
def store():
    store = Store()
    store.hello(ME)
    return store


@pytest.fixture
def client(store):
    return Client(store)


def pointer(store, key):
    return store._contents.shards[key].value.unsafe_buffer_pointer()


def aligned(shape, fill=0.0):
    size = int(np.prod(shape)) * 4
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(np.float32).reshape(shape)
    array[...] = fill
    return array


ZERO = np.zeros(4, np.float32)
ONE = np.ones(4, np.float32)


def adder(client, key="w", like=ZERO):
    return client.add(lambda value, by: value + by, [key], [0], like, like)


# Values.


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "bool", "int64", "float64", "complex64"],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)], ids=str)
def test_values_are_returned_unchanged(client, dtype, shape):
    value = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    client.create(w=value)
    (read,) = client.read("w")
    assert (read.dtype, read.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(read, value)
    client.ask("assign", [value + value], keys=["w"])
    np.testing.assert_array_equal(client.read("w")[0], value + value)


@pytest.mark.parametrize("num_bytes", [256, MAX_COPIED_BYTES * 2, BYTES_PER_BLOCK * 2 + 4096], ids=str)
def test_arguments_are_copied(client, num_bytes):
    value = aligned((num_bytes // 256, 64), 1.0)
    client.create(w=value)
    value[:] = 2.0  # the transport receives the next message
    (read,) = client.read("w")
    assert (read == 1.0).all()
    client.ask("assign", [value], keys=["w"])
    value[:] = 3.0
    (read,) = client.read("w")
    assert (read == 2.0).all()
    digest = client.add(lambda old, new: new, ["w"], [0], value, value)
    client.step(digest, [value])
    value[:] = 4.0
    (read,) = client.read("w")
    assert (read == 3.0).all()


def test_large_values_are_copied_in_blocks_that_need_not_divide_them():
    rows = BYTES_PER_BLOCK // 400 * 2 + 7
    value = np.random.default_rng(0).standard_normal((rows, 100)).astype(np.float32)
    held = copied(value, jax.devices("cpu")[0])
    np.testing.assert_array_equal(np.asarray(held), value)


def test_a_program_makes_the_initial_value(client, store):
    digest = client.add(lambda: jnp.full((4, 2), 7.0), [], [])
    piece = {"key": "w", "shape": [4, 2], "dtype": "float32", "initial": digest}
    client.ask("create", shards=[piece, {**piece, "key": "m"}])
    assert [(read == 7.0).all() for read in client.read("w", "m")] == [True, True]
    before = pointer(store, "w")
    client.step(adder(client, like=np.zeros((4, 2), np.float32)), [np.ones((4, 2), np.float32)])
    assert pointer(store, "w") == before
    assert [read.min() for read in client.read("w", "m")] == [8.0, 7.0]


def test_program_that_creates_a_piece_must_exist(client):
    piece = {"key": "w", "shape": [5], "dtype": "float32", "initial": "abc"}
    with pytest.raises(UnknownProgramError):
        client.ask("create", shards=[piece])


def test_creating_existing_shards(client):
    client.create(w=ZERO)
    client.step(adder(client), [ONE])
    piece = {"key": "w", "shape": [4], "dtype": "float32", "initial": "array"}
    new = {**piece, "key": "v"}
    with pytest.raises(InvalidArgumentError, match=r'"w" exists already as float32\[4\]'):
        client.ask("create", [ZERO, ZERO], shards=[new, piece])
    with pytest.raises(InvalidArgumentError, match='no shard "v"'):
        client.read("v")  # all or none
    client.ask("create", [ZERO, ZERO], shards=[new, piece], if_absent=True)
    assert [read.max() for read in client.read("w", "v")] == [1.0, 0.0]
    with pytest.raises(InvalidArgumentError, match="int8"):
        client.ask("create", [np.zeros(4, np.int8)], shards=[{**piece, "dtype": "int8"}], if_absent=True)


def test_dropping(client, store):
    client.create(w=ZERO, v=ZERO)
    version = client.step(pull=[["w", None]]).header["versions"][0]
    client.ask("drop", keys=["w"])
    client.ask("drop", keys=["w"])  # asked again, after a link broke
    with pytest.raises(InvalidArgumentError, match=r'"w".*"v"'):
        client.read("w")
    client.create(w=ONE)  # another one of this name is another version
    answer = client.step(pull=[["w", version]])
    assert [read.max() for read in answer.arrays] == [1.0]
    assert store.statistics()["bytes"] == 32


def test_assigning_all_or_none(client):
    client.create(w=ZERO, v=ZERO)
    for value, got in ((np.ones(5, np.float32), r"float32\[5\]"), (np.ones(4, np.int32), r"int32\[4\]")):
        with pytest.raises(InvalidArgumentError, match=rf'"v" is float32\[4\], and cannot be assigned {got}'):
            client.ask("assign", [ONE, value], keys=["w", "v"])
    with pytest.raises(InvalidArgumentError, match='no shard "x"'):
        client.ask("assign", [ONE, ONE], keys=["w", "x"])
    with pytest.raises(ValueError):
        client.ask("assign", [ONE, ONE], keys=["w"])
    assert [read.max() for read in client.read("w", "v")] == [0.0, 0.0]
    client.ask("assign", [ONE, ONE * 2], keys=["w", "v"])
    assert [read.max() for read in client.read("w", "v")] == [1.0, 2.0]


# In place, and views.


def momentum(value, velocity, gradient):
    velocity = 0.5 * velocity + gradient
    return value - velocity, velocity


@pytest.mark.parametrize("size", [4, 100_000, BYTES_PER_BLOCK // 2], ids=str)
def test_updates_are_in_place(client, store, size):
    like = np.zeros((size, 1), np.float32)
    client.create(w=like, m=like)
    digest = client.add(momentum, ["w", "m"], [0, 1], like, like, like)
    before = pointer(store, "w"), pointer(store, "m")
    for _ in range(3):
        client.step(digest, [np.ones_like(like)], pull=[["w", None], ["m", None]])
    assert {pointer(store, "w"), pointer(store, "m")} == set(before)
    assert client.read("w")[0].max() == -(1 + 1.5 + 1.75)


def test_write_only_value_is_updated_in_place(client, store):
    client.create(w=ZERO)
    digest = client.add(lambda old, new: new, ["w"], [0], ZERO, ZERO)
    before = pointer(store, "w")
    client.step(digest, [ONE])
    assert pointer(store, "w") == before
    assert client.read("w")[0].max() == 1.0


def test_one_result_for_two_pieces_is_two_values(client):
    client.create(w=ZERO, v=ZERO)
    both = client.add(lambda w, v, new: (new, new), ["w", "v"], [0, 1], ZERO, ZERO, ZERO)
    client.step(both, [ONE])
    client.step(adder(client), [ONE])
    assert [read.max() for read in client.read("w", "v")] == [2.0, 1.0]
    client.step(both, [ONE])


def test_only_written_values_are_donated(client, store):
    client.create(rate=ONE, w=ZERO)
    digest = client.add(lambda rate, w, g: w - rate * g, ["rate", "w"], [1], ZERO, ZERO, ZERO)
    for _ in range(3):
        client.step(digest, [ONE])
    assert [read.max() for read in client.read("rate", "w")] == [1.0, -3.0]


@pytest.mark.parametrize("how", ["step", "assign"])
def test_view_keeps_its_bytes_and_memory_while_alive(client, store, how):
    like = np.zeros((MAX_COPIED_BYTES // 4, 2), np.float32)
    client.create(w=like)
    digest = adder(client, like=like)

    def change():
        if how == "step":
            client.step(digest, [np.ones_like(like)])
        else:
            client.ask("assign", [client.read("w")[0] + 1], keys=["w"])

    (view,) = client.step(pull=[["w", None]]).arrays
    before = pointer(store, "w")
    assert view.ctypes.data == before  # nothing was copied
    change()
    assert not view.any()
    assert pointer(store, "w") != before
    del view
    before = pointer(store, "w")
    change()
    assert pointer(store, "w") == before
    assert (client.read("w")[0] == 2.0).all()


def test_small_values_are_copied_and_large_ones_are_not(client, store):
    large = np.zeros((MAX_COPIED_BYTES // 4, 1), np.float32)
    client.create(large=large, small=ZERO)
    answer = client.step(pull=[["large", None], ["small", None]])
    pointers = [array.ctypes.data for array in answer.arrays]
    assert [pointers[0] == pointer(store, "large"), pointers[1] == pointer(store, "small")] == [True, False]
    before = pointer(store, "small")
    client.step(adder(client, "small"), [ONE])
    assert pointer(store, "small") == before
    assert answer.arrays[1].max() == 0.0


def test_a_failed_step_keeps_no_views(client, store):
    like = np.zeros((MAX_COPIED_BYTES // 4, 2), np.float32)
    client.create(w=like)
    digest = adder(client, like=like)
    with pytest.raises(InvalidArgumentError) as failure:
        client.step(digest, [ONE], pull=[["w", None]])
    before = pointer(store, "w")
    client.step(digest, [like])
    assert pointer(store, "w") == before
    assert failure.value.__traceback__ is not None  # which has the frames


# Versions and rows.


def test_unchanged_values_are_not_sent_again(client, store):
    client.create(w=ZERO, v=ZERO)
    first = client.step(pull=[["w", None], ["v", None]])
    known = [["w", first.header["versions"][0]], ["v", first.header["versions"][1]]]
    assert len(first.arrays) == 2
    assert client.step(pull=known).arrays == []
    second = client.step(adder(client, "v"), [ONE], pull=known)
    assert [array.max() for array in second.arrays] == [1.0]
    assert second.header["versions"][0] == known[0][1]
    assert second.header["versions"][1] != known[1][1]
    assert second.header["versions"][1][0] == store.instance
    client.ask("assign", [ONE], keys=["w"])
    assert len(client.step(pull=known).arrays) == 2
    elsewhere = [["w", ["another", second.header["versions"][0][1]]]]
    assert len(client.step(pull=elsewhere).arrays) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows(client, dtype):
    table = np.arange(30).reshape(10, 3).astype(jnp.dtype(dtype))
    client.create(t=table, w=ZERO)
    numbers = np.array([3, 3, 9, 10, 2**31 - 1, -1, -(2**31)], np.int32)
    answer = client.step(pull=[["w", None]], rows={"t": numbers})
    assert len(answer.arrays) == 2
    np.testing.assert_array_equal(answer.arrays[1], table[[3, 3, 9, 9, 9, 0, 0]])
    assert client.step(rows={"t": numbers[:0]}).arrays[0].shape == (0, 3)


def test_rows_are_those_after_the_update(client):
    table = np.zeros((10, 3), np.float32)
    client.create(t=table)
    ids, gradients = np.array([1, 4, 10], np.int32), np.ones((3, 3), np.float32)
    digest = client.add(lambda t, ids, g: t.at[ids].add(-g, mode="drop"), ["t"], [0], table, ids, gradients)
    answer = client.step(digest, [ids, gradients], closure=0, rows={"t": np.arange(10, dtype=np.int32)})
    np.testing.assert_array_equal(answer.arrays[0][:, 0], [0, -1, 0, 0, -1, 0, 0, 0, 0, 0])


def test_rows_of_a_scalar(client):
    client.create(s=np.float32(1.0).reshape(()), e=np.zeros((0, 2), np.float32))
    for key in ("s", "e"):
        with pytest.raises(InvalidArgumentError, match=f'Shard "{key}" has the shape'):
            client.step(rows={key: np.zeros(1, np.int32)})


# Exactly once.


def test_a_closure_is_applied_once(client, store):
    client.create(w=ZERO)
    digest = adder(client)
    assert client.step(digest, [ONE], closure=3).header["duplicate"] is False
    again = client.step(digest, [ONE], closure=3, pull=[["w", None]])
    assert again.header["duplicate"] is True
    assert again.arrays[0].max() == 1.0  # it is answered all the same
    assert client.step(closure=4, pull=[["w", None]]).header["duplicate"] is False  # reading is no pushing
    assert client.step(digest, [ONE], closure=4).header["duplicate"] is False
    assert client.step(digest, [ONE], closure=9, low=7).header["duplicate"] is False
    assert client.step(digest, [ONE], closure=5).header["duplicate"] is True  # it has ended
    assert client.step(digest, [ONE], closure=8, low=2).header["duplicate"] is False  # an older message
    assert client.step(digest, [ONE], closure=["other", 3]).header["duplicate"] is False
    assert client.step(digest, [ONE]).header["duplicate"] is False
    assert client.step(digest, [ONE]).header["duplicate"] is False
    assert client.read("w")[0].max() == 7.0
    statistics = store.statistics()
    assert (statistics["updates"], statistics["duplicates"]) == (7, 2)


def test_closures_of_several_clients(client, monkeypatch):
    monkeypatch.setattr(window, "MAX_WINDOWS", 2)
    client.create(w=ZERO)
    digest = adder(client)
    for who in ("a", "b", "a"):  # b is silent for longest
        client.step(digest, [ONE], closure=[who, 0], low=0)
    assert client.read("w")[0].max() == 2.0
    client.step(digest, [ONE], closure=["c", 0])
    assert [client.step(digest, [ONE], closure=[who, 0]).header["duplicate"] for who in ("a", "c", "b")] == [
        True,
        True,
        False,
    ]


def test_failed_steps_are_not_applied(client, store):
    client.create(w=ZERO, v=np.zeros(5, np.float32))
    digest = adder(client)
    before = client.step(pull=[["w", None]]).header
    with pytest.raises(UnknownProgramError) as unknown:
        client.step("abc", [ONE], closure=1)
    assert unknown.value.digest == "abc"
    for operands in ([], [ONE, ONE], [np.ones(5, np.float32)], [np.ones(4, np.int32)]):
        with pytest.raises(InvalidArgumentError, match=r"takes the operands \[float32\[4\]\], got \["):
            client.step(digest, operands, closure=1)
    other = adder(client, "v")
    with pytest.raises(InvalidArgumentError, match=r'"v".*float32\[4\].*float32\[5\]'):
        client.step(other, [ONE], closure=1)
    with pytest.raises(InvalidArgumentError, match='no shard "x"'):
        client.step(digest, [ONE], closure=1, pull=[["x", None]])
    with pytest.raises(InvalidArgumentError, match='no shard "x"'):
        client.step(digest, [ONE], closure=1, rows={"x": np.zeros(1, np.int32)})
    assert client.step(pull=[["w", None]]).header == before
    assert store.statistics()["updates"] == 0
    assert client.step(digest, [ONE], closure=1).header["duplicate"] is False
    assert client.read("w")[0].max() == 1.0


def greedy(client):
    """A program that needs terabytes for intermediate values, and a piece for it."""

    def update(value, by):
        large = jax.lax.sort(value[:, None] * by[0] + jnp.arange(1 << 33, dtype=jnp.float32))
        return value + large[:, :1024].sum()

    client.create(g=np.ones(1024, np.float32))
    return client.add(update, ["g"], [0], np.ones(1024, np.float32), ONE)


def test_an_update_that_cannot_run_changes_nothing(client):
    digest = greedy(client)
    with pytest.raises(MemoryError, match="Nothing was updated"):
        client.step(digest, [ONE], closure=1)
    assert (client.read("g")[0] == 1.0).all()
    assert client.step(adder(client, "g", np.ones(1024, np.float32)), [np.ones(1024, np.float32)], closure=1)
    assert (client.read("g")[0] == 2.0).all()


def test_value_lost_in_a_failed_update_is_not_read_again(client, monkeypatch):
    digest = greedy(client)
    monkeypatch.setattr(updates_module, "_MIN_CHECKED_BYTES", 1 << 60)  # it looked as if there were room
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        client.step(digest, [ONE], closure=1)
    for again in (lambda: client.read("g"), lambda: client.step(digest, [ONE], closure=1)):
        with pytest.raises(RuntimeError, match='The value of shard "g" was lost'):
            again()
    client.ask("assign", [np.ones(1024, np.float32)], keys=["g"])
    assert (client.read("g")[0] == 1.0).all()


# Programs.


def test_program_is_compiled_once_on_arrival(client, store, monkeypatch):
    made = []

    class Counted(updates_module.CompiledUpdate):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(store_module, "CompiledUpdate", Counted)
    client.create(w=ZERO)
    program = program_of(lambda w, by: w + by, ["w"], [0], ZERO, ONE)
    threads = [threading.Thread(target=client.add_program, args=[program]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    with jax.log_compiles(), jax.no_tracing():  # no tracing: nothing is left to be compiled
        client.step(program.digest, [ONE])
    assert client.read("w")[0].max() == 1.0


def test_rejected_programs(client):
    good = program_of(lambda w, by: w + by, ["w"], [0], ZERO, ONE)
    bad = {
        "are not a program": UpdateProgram(b"\x10\x00\x00\x00 nothing", ("w",), (0,)),
        "but the shards that it writes are": UpdateProgram(good.blob, ("w", "v"), (0, 1)),
        "to write at least one": program_of(lambda w: (), ["w"], [], ZERO),
        "float32\\[2\\]": program_of(lambda w: w[:2], ["w"], [0], ZERO),
    }
    for text, program in bad.items():
        with pytest.raises(InvalidArgumentError, match=text):
            client.add_program(program)
    with pytest.raises(InvalidArgumentError, match="own digest"):
        client.ask("program", [np.frombuffer(good.blob, np.uint8)], digest="1", described=good.described())
    for_tpu = export.export(jax.jit(lambda w: w), platforms=["tpu"])(ZERO).serialize()
    with pytest.raises(InvalidArgumentError, match=r'platforms=\["cpu"\]'):
        client.add_program(UpdateProgram(bytes(for_tpu), ("w",), (0,)))


def test_programs_of_64_bits(client, store):
    with jax.enable_x64(True):
        like = np.zeros(3, np.float64)
        program = program_of(lambda w, by: w + by, ["w"], [0], like, like)
    client.create(w=np.full(3, 1 + 2**-40))
    client.add_program(program)
    before = pointer(store, "w")
    client.step(program.digest, [np.full(3, 2.0**-50)])
    np.testing.assert_array_equal(client.read("w")[0], 1 + 2.0**-40 + 2.0**-50)
    assert pointer(store, "w") == before


# Coordinators.


def test_a_new_coordinator_takes_over(client, store):
    client.create(w=ZERO)
    program = program_of(lambda w, by: w + by, ["w"], [0], ZERO, ONE)
    digest = client.add_program(program)
    client.step(digest, [ONE], closure=0)
    store.hello(ME)
    assert client.read("w")[0].max() == 1.0  # the same one again
    store.hello("next")
    with pytest.raises(UnavailableError, match="next"):
        client.read("w")
    after = Client(store, "next")
    with pytest.raises(InvalidArgumentError, match="which has none"):
        after.read("w")
    with pytest.raises(UnknownProgramError):
        after.step(digest, [ONE])
    after.create(w=ZERO)
    after.add_program(program)
    assert after.step(digest, [ONE], closure=0).header["duplicate"] is False  # its windows are gone, too
    assert store.statistics()["updates"] == 1


def test_leaving_and_restarting(client, store):
    client.create(w=ZERO)
    store.leave()
    assert store.statistics()["shards"] == 0
    for left in (client, Client(Store())):
        with pytest.raises(UnavailableError, match="None"):
            left.read("w")
    store.hello(ME)
    with pytest.raises(InvalidArgumentError, match="which has none"):
        client.read("w")


def test_new_coordinator_takes_over_while_a_piece_is_created(client, store, monkeypatch):
    def late(value, device):
        store.hello("next")
        return copied(value, device)

    monkeypatch.setattr(store_module, "copied", late)
    with pytest.raises(UnavailableError):
        client.create(w=ZERO)
    assert store.statistics()["shards"] == 0


@pytest.mark.parametrize(
    ("op", "header"),
    [
        ("fetch", {}),
        ("create", {}),
        ("create", {"shards": [{"key": "w", "shape": [1], "dtype": "int8", "initial": "array"}]}),
        ("program", {"digest": "1", "described": {"state": [], "written": []}}),
        ("step", {"closure": ["me"]}),
        ("step", {"pull": ["w"]}),
        ("step", {"pull": [["w", 3]]}),
        ("step", {"rows": ["w"]}),
        ("assign", {}),
        ("drop", {}),
    ],
)
def test_invalid_headers(client, op, header):
    with pytest.raises(MessageError):
        client.ask(op, **header)


@pytest.mark.parametrize("described", [{}, {"state": ["w"]}])
def test_programs_that_are_described_wrongly(client, described):
    with pytest.raises(MessageError):
        client.ask("program", [np.zeros(3, np.uint8)], digest="1", described=described)


# Statistics.


def test_statistics(client, store):
    table = np.zeros((10, 2), np.float32)
    client.create(w=ZERO, t=table)
    client.step(adder(client), [ONE], pull=[["w", None]], rows={"t": np.zeros(3, np.int32)})
    statistics = store.statistics()
    assert {name: statistics[name] for name in ("shards", "bytes", "programs", "updates", "pulls")} == {
        "shards": 2,
        "bytes": 16 + 80,
        "programs": 1,
        "updates": 1,
        "pulls": 1,
    }
    assert (statistics["shards_sent"], statistics["rows_sent"]) == (1, 3)


def test_staleness_counts_updates_of_others_since_the_read(client, store):
    client.create(w=ZERO)
    digest = adder(client)
    known = client.step(pull=[["w", None]]).header["versions"][0]
    for number in range(4):
        client.step(digest, [ONE], closure=number, used=[["w", known]])  # 0, 1, 2, 3 came between
    last = client.step(digest, [ONE], closure=9, pull=[["w", known]]).header["versions"][0]  # 4
    client.step(digest, [ONE], closure=10, pull=[["w", last]])  # 0
    client.step(digest, [ONE], closure=10, pull=[["w", known]])  # a duplicate
    client.step(digest, [ONE], closure=11)  # it does not say
    client.step(digest, [ONE], closure=12, pull=[["w", ["another", 0]]])
    staleness = store.statistics()["staleness"]
    assert staleness == {
        "num": 6,
        "mean": 10 / 6,
        "max": 4,
        "histogram": {"0": 2, "1": 1, "2": 2, "4": 1},
    }


# Threads.


@pytest.mark.parametrize("size", [1024, MAX_COPIED_BYTES // 4], ids=["copied", "views"])
def test_reads_during_updates_are_consistent(client, size):
    like = np.zeros((size, 1), np.float32)
    client.create(w=like, n=np.zeros((), np.int32), t=like)
    digest = client.add(
        lambda w, n, t, by: (w + by, n + 1, t + by), ["w", "n", "t"], [0, 1, 2], like, np.int32(0), like, like
    )
    num_threads, num_updates = 3, 60
    failures, num_reads, is_over = [], [0], threading.Event()

    def update(first):
        one = np.ones_like(like)
        for number in range(first, first + num_updates):
            for _ in range(2):  # each comes twice
                client.step(digest, [one], closure=number)

    def read():
        numbers = np.arange(100, dtype=np.int32)
        while not is_over.is_set():
            answer = client.step(pull=[["w", None], ["n", None], ["t", None]], rows={"t": numbers})
            w, n, t, rows = answer.arrays
            if not all((array == n).all() for array in (w, t, rows)):
                failures.append(f"torn: {w.min()} {w.max()} {n} {t.min()} {t.max()} {rows.min()}")
            num_reads[0] += 1

    def guarded(fn, *args):
        try:
            fn(*args)
        except BaseException as error:
            failures.append(repr(error))

    readers = [threading.Thread(target=guarded, args=[read]) for _ in range(2)]
    updaters = [threading.Thread(target=guarded, args=[update, i * num_updates]) for i in range(num_threads)]
    for thread in readers + updaters:
        thread.start()
    for thread in updaters:
        thread.join()
    is_over.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert num_reads[0] > 0
    assert client.read("n")[0] == num_threads * num_updates
