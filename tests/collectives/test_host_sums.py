"""Sums of host arrays over processes: the same bits with every assignment of replicas, and one error when a world ends.

The members are threads here, with the connections and the shared memory of processes.
"""

import contextlib
import gc
import os
import random
import socket
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest

from certificates import credentials_of_ca
from crowds import LIMIT_S, TOKEN, Crowd, SharedFiles, bits
from replicax._src.cluster.failures import ClusterStartError, ProgramMismatchError
from replicax._src.collectives.host_sums import reduction, shared_memory, windows
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.links import LinkLost
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.negotiation import Negotiation
from replicax._src.collectives.host_sums.ordered_addition import DTYPES, HostOp, combine
from replicax._src.collectives.host_sums.reduction import shared_bytes
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.collectives.host_sums.shared_memory import Segment, make_segment, open_offer
from replicax._src.collectives.host_sums.windows import WINDOW_BYTES, part_bytes, windows_of
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.wire.errors import PeerEndedError
from replicax._src.wire.security import Security

pytestmark = pytest.mark.timeout(180)
SOON_S = 40.0  # what takes milliseconds on a quiet machine


@pytest.fixture(scope="module")
def crowds():
    """``crowds(num_members, shares_memory)``: a crowd that the tests of this file share."""
    made = {}

    def crowd(num_members, shares_memory=True):
        key = num_members, shares_memory
        if key not in made:
            made[key] = Crowd(num_members, shares_memory=shares_memory)
        return made[key]

    yield crowd
    for each in made.values():
        each.close()


@pytest.fixture(params=["shared memory", "connections"])
def shares(request):
    return request.param == "shared memory"


@pytest.fixture
def crowd(shares):
    """Three members of their own."""
    crowd = Crowd(3, shares_memory=shares)
    with contextlib.closing(crowd):
        yield crowd


def wait_until(condition):
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def expected(op, arrays):
    """The loop that the sum must equal, bit for bit."""
    function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    dtype = arrays[0].dtype
    is_half = dtype in (np.float16, ml_dtypes.bfloat16)
    total = arrays[0].astype(np.float32) if is_half else arrays[0]
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total = function(total, array.astype(np.float32) if is_half else array)
        return total.astype(dtype)


def arrays_of(seed, num_replicas, length, dtype):
    """Arrays whose sum depends on the order of addition."""
    numbers = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return [numbers.random(length) < 0.5 for _ in range(num_replicas)]
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return [
            numbers.integers(bounds.min, bounds.max, length, dtype, endpoint=True)
            for _ in range(num_replicas)
        ]
    powers = [10.0 ** numbers.integers(-3, 4, length) for _ in range(num_replicas)]
    return [(numbers.standard_normal(length) * power).astype(dtype) for power in powers]


# --- the order of addition ----------------------------------------------------------------------------

LENGTHS = [0, 1, 2, 3, 17, 1000, 8191, 8193, 20_011, 300_007]
LARGE = [2**20 + 1, 2_621_441]  # two and three windows of float32


@st.composite
def assignments(draw):
    """The replicas of each member."""
    num_members = draw(st.integers(1, 4))
    num_replicas = draw(st.integers(num_members, 6))
    order = draw(st.permutations(range(num_replicas)))
    cuts = sorted(draw(st.permutations(range(1, num_replicas)))[: num_members - 1])
    return [sorted(order[low:high]) for low, high in zip([0, *cuts], [*cuts, num_replicas], strict=True)]


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    held=assignments(),
    length=st.sampled_from(LENGTHS) | st.integers(0, 50_000),
    dtype=st.sampled_from(["float32", "float64", "int32", "int64", "uint32", "float16", ml_dtypes.bfloat16]),
    op=st.sampled_from(["sum", "max", "min"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_members_add_in_the_order_of_the_replicas_whoever_holds_them(
    crowds, held, length, dtype, op, seed
):
    arrays = arrays_of(seed, sum(map(len, held)), length, dtype)
    wanted = bits(expected(op, arrays))
    for shares_memory in (True, False):
        results = crowds(len(held), shares_memory).sum(arrays, held, op=op)
        assert [bits(result) == wanted for result in results] == [True] * len(held)
        assert {result.dtype for result in results} == {arrays[0].dtype}


def test_exchanges_of_one_world_follow_each_other_without_waiting_for_all(crowds, shares):
    """Members that are ahead write the next arrays while others still read the last ones."""
    worlds = crowds(2, shares).meet()
    sizes = [9_000, 100_000, 1, 300_000, 131_072, 9_001]  # in one hop and in two
    lengths = [sizes[step % len(sizes)] for step in range(60)]
    arrays = [arrays_of(step, 2, length, "float32") for step, length in enumerate(lengths)]

    def digests(place):
        found = []
        for step, of_replicas in enumerate(arrays):
            total = worlds[place].all_reduce("sum", [of_replicas[place]], step=step)
            if (step + place) % 3 == 0:
                time.sleep(0.002)
            found.append(bits(total))
        return found

    wanted = [bits(expected("sum", of_replicas)) for of_replicas in arrays]
    assert crowds(2, shares).each(digests) == [wanted] * 2


@pytest.mark.parametrize("length", LARGE)
def test_arrays_of_several_windows_add_in_the_order_of_the_replicas(crowds, shares, length):
    arrays = arrays_of(0, 4, length, np.float32)
    wanted = bits(expected("sum", arrays))
    results = crowds(3, shares).sum(arrays, [(0, 3), (1,), (2,)])
    assert [bits(result) == wanted for result in results] == [True] * 3


def test_the_order_of_the_replicas_makes_a_difference():
    """Otherwise the tests above prove nothing."""
    arrays = arrays_of(0, 4, 1000, np.float32)
    assert bits(expected("sum", arrays)) != bits(expected("sum", arrays[::-1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_exchanged(crowds, shares, dtype):
    for op in ("sum", "max"):
        if (op, dtype.kind) in (("sum", "b"), ("max", "c")):
            continue
        for length in (5, 20_000):
            arrays = arrays_of(1, 2, length, dtype)
            for result in crowds(2, shares).sum(arrays, op=op):
                assert bits(result) == bits(expected(op, arrays))


def test_signed_zeros_have_the_sign_of_the_loop_wherever_an_array_is_cut(crowds, shares):
    zeros = np.random.default_rng(0).choice(np.float32([0.0, -0.0]), (3, 30_001))
    for op in ("max", "min", "sum"):
        for result in crowds(3, shares).sum(list(zeros), op=op):
            assert bits(result) == bits(expected(op, list(zeros)))


def test_half_precision_is_added_in_float32_and_rounded_once(crowds):
    ones = [np.array([256.0], ml_dtypes.bfloat16), *[np.array([1.0], ml_dtypes.bfloat16)] * 2]
    assert ones[0] + ones[1] + ones[2] == 256  # in bfloat16 each 1 is lost
    for result in crowds(3).sum(ones):
        assert result == 258


def test_infinities_and_nan_are_results_without_warnings(crowds, shares):
    most = np.finfo(np.float32).max
    first = np.tile(np.float32([most, np.inf, np.nan, -most]), 10_000)
    second = np.tile(np.float32([most, -np.inf, 1.0, -most]), 10_000)
    for result in crowds(2, shares).sum([first, second]):
        np.testing.assert_array_equal(result[:4], np.float32([np.inf, np.nan, np.nan, -np.inf]))


def test_combined_blocks_equal_a_whole_loop():
    arrays = arrays_of(3, 3, 200_000, np.float32)
    result = np.empty_like(arrays[0])
    combine(HostOp.SUM, arrays, result)
    assert bits(result) == bits(expected("sum", arrays))


@hypothesis.given(
    length=st.integers(1, 40_000_000),
    item_bytes=st.sampled_from([1, 2, 4, 8, 16]),
    members=st.integers(1, 70),
)
def test_windows_and_parts_cover_an_array_once_and_fit_into_shared_memory(length, item_bytes, members):
    cut = windows_of(length, item_bytes, members)
    assert [window.start for window in cut[1:]] == [window.stop for window in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (0, length)
    for window in (cut[0], cut[-1]):
        assert len(window.parts) == members
        assert window.parts[0].start == window.start
        assert window.parts[-1].stop == window.stop
        assert (window.stop - window.start) * item_bytes <= WINDOW_BYTES
        for part, after in zip(window.parts, [*window.parts[1:], None], strict=True):
            assert after is None or part.stop == after.start
            assert (part.stop - part.start) * item_bytes <= part_bytes(members)
            assert part.start == part.stop or part.start * item_bytes % 64 == 0


# --- several exchanges --------------------------------------------------------------------------------


def test_exchanges_of_all_sizes_follow_each_other(crowd):
    worlds = crowd.meet([(0, 2), (1,), (3,)])
    arrays = [arrays_of(step, 4, LENGTHS[step % len(LENGTHS)], np.float32) for step in range(30)]
    held = [member.replicas for member in worlds[0].members]

    def run(place):
        sums = []
        for step, of_step in enumerate(arrays):
            own = [of_step[replica] for replica in held[place]]
            sums.append(bits(worlds[place].all_reduce("sum", own, step=step, rows=96)))
        return sums

    wanted = [bits(expected("sum", of_step)) for of_step in arrays]
    assert crowd.each(run) == [wanted] * 3
    assert worlds[0].statistics()["num_exchanges"] == 30


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of 16 KB, so that small arrays have many."""
    for module in (windows, reduction):
        monkeypatch.setattr(module, "WINDOW_BYTES", 16 * 1024)
    windows_of.cache_clear()
    yield
    windows_of.cache_clear()


def test_members_of_any_pace_read_shared_memory_before_it_is_written_again(crowd, small_windows, monkeypatch):
    """Each step of each member takes its own time, so that fast ones are as far ahead as they can get."""
    for name in ("_send_slices", "_combine_part", "_take_sums"):
        act, pace = getattr(reduction._Run, name), random.Random(name)

        def slowed(run, *arguments, act=act, pace=pace):
            time.sleep(pace.choice([0, 0, 0, 0.004, 0.012]))
            act(run, *arguments)

        monkeypatch.setattr(reduction._Run, name, slowed)
    held = [(0, 4), (1,), (2, 3)]
    worlds = crowd.meet(held)
    steps = [arrays_of(step, 5, 80_007, np.float32) for step in range(3)]

    def run(place):
        return [
            bits(worlds[place].all_reduce("sum", [arrays[replica] for replica in held[place]], step=step))
            for step, arrays in enumerate(steps)
        ]

    assert crowd.each(run) == [[bits(expected("sum", arrays)) for arrays in steps]] * 3


def test_members_of_one_host_share_memory_and_others_send_bytes(crowd, shares):
    worlds = crowd.meet()
    crowd.each(lambda place: worlds[place].all_reduce("sum", [np.ones(10**6, np.float32)], step=0))
    figures = worlds[0].statistics()
    assert figures["shares_memory_with"] == (["worker 1", "worker 2"] if shares else [])
    assert (figures["bytes_out"] > 10**6) == (not shares)


def test_members_that_share_memory_and_members_that_do_not_form_one_world():
    mixed = Crowd(3)
    mixed.rendezvous[2]._shares_memory = False
    with contextlib.closing(mixed):
        arrays = arrays_of(0, 4, 2_621_441, np.float32)
        results = mixed.sum(arrays, [(0,), (1, 3), (2,)])
        assert [bits(result) == bits(expected("sum", arrays)) for result in results] == [True] * 3


@pytest.mark.parametrize("kind", ["TLS", "checksums"])
def test_connections_are_those_of_the_wire_with_tls_and_checksums(kind, tmp_path):
    security = (
        credentials_of_ca(tmp_path, "a").security() if kind == "TLS" else Security(b"x", always_checks=True)
    )
    secured = Crowd(2, shares_memory=False, security=security)
    with contextlib.closing(secured):
        arrays = arrays_of(0, 2, 1_500_000, np.float32)
        for result in secured.sum(arrays):
            assert bits(result) == bits(expected("sum", arrays))


def test_results_have_the_shape_of_the_arrays(crowds):
    for shape in ((), (0,), (3, 4), (200, 300)):
        for result in crowds(2).sum([np.ones(shape, np.float32)] * 2):
            assert result.shape == shape
            assert (result == 2).all()


def test_arrays_that_are_views_of_others_are_exchanged(crowds, shares):
    whole = np.arange(60_000, dtype=np.float32).reshape(200, 300)
    for result in crowds(2, shares).sum([whole.T, whole.T]):
        np.testing.assert_array_equal(result, 2 * whole.T)


# --- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 100_000])
def test_jax_adopts_a_result_without_a_copy_and_its_memory_is_used_again_only_when_all_is_deleted(
    crowd, length
):
    worlds = crowd.meet()
    ones = np.ones(length, np.float32)

    def exchange(step):
        return crowd.each(lambda place: worlds[place].all_reduce("sum", [ones * (step + 1)], step=step))[0]

    result = exchange(0)
    address = result.ctypes.data
    assert address % 64 == 0
    assert not result.flags.writeable
    array = jax.device_put(result, jax.devices("cpu")[0])
    if length > 4:
        assert array.unsafe_buffer_pointer() == address
    del result
    for step in range(1, 6):
        exchange(step)
    np.testing.assert_array_equal(array, 3 * ones)  # six exchanges have not changed it
    array.delete()
    del array
    gc.collect()
    places = {exchange(step).ctypes.data for step in range(6, 12)}
    assert len(places) <= 3  # the same few blocks serve all steps


def test_no_file_and_no_descriptor_is_left(shares):
    def descriptors():
        found = []
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{entry}"))
        return found

    gc.collect()
    before, files, threads = len(descriptors()), SharedFiles(), threading.active_count()
    crowd = Crowd(3, shares_memory=shares)

    members, arrays = crowd.members(), [np.ones(10**5, np.float32)]

    def exchange(epoch):  # the second rendezvous closes the world of the first
        worlds = crowd.each(lambda place: crowd.rendezvous[place].meet(epoch, members, place, LIMIT_S))
        crowd.each(lambda place: float(worlds[place].all_reduce("sum", arrays, step=0)[0]))

    exchange(1)
    exchange(2)
    files.check()
    crowd.close()
    gc.collect()
    until = time.monotonic() + SOON_S
    while len(descriptors()) > before or threading.active_count() > threads:
        assert time.monotonic() < until, (descriptors(), threading.enumerate())
        time.sleep(0.01)


def test_a_system_without_shared_memory_uses_connections(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    crowd = Crowd(2)
    with contextlib.closing(crowd):
        arrays = arrays_of(0, 2, 100_000, np.float32)
        for result in crowd.sum(arrays):
            assert bits(result) == bits(expected("sum", arrays))
    assert "Too many open files" in caplog.text
    assert "Connections are used instead" in caplog.text


def test_memory_of_another_host_container_or_process_is_not_opened():
    segment = Segment(100)
    with contextlib.closing(segment):
        opened = open_offer(segment.offer, 100)
        segment.memory[:] = 7
        assert opened is not None
        assert (opened == 7).all()
        assert not opened.flags.writeable
        for change in (
            {"kernel": "another"},
            {"nonce": "00" * 32},
            {"process": 2**22 + 1},
            {"descriptor": 0},
            {"bytes": 101},
            {"bytes": "100"},
            {"more": 1},
        ):
            assert open_offer(segment.offer | change, 100) is None
        assert open_offer(None, 100) is None
        assert open_offer(segment.offer | {"bytes": 10**9}, 10**9) is None  # it has fewer
    assert open_offer(segment.offer, 100) is None
    assert (opened == 7).all()  # who has it keeps it


def test_memory_that_nobody_writes_takes_no_room():
    segment = make_segment(shared_bytes(100, 2))
    assert segment is not None
    assert os.fstat(segment._file).st_blocks * 512 < 10**5
    segment.close()


# --- members that differ ------------------------------------------------------------------------------

SAME = {"op": "sum", "dtype": np.float32, "length": 8, "step": 3, "round": 1, "rows": 96}


@pytest.mark.parametrize("length", [8, 100_000])
@pytest.mark.parametrize(
    "change",
    [{"op": "max"}, {"dtype": np.int32}, {"length": 12_345}, {"step": 4}, {"round": 2}, {"rows": 97}],
    ids=lambda change: next(iter(change)),
)
def test_members_that_exchange_different_things_are_both_named(crowd, change, length):
    worlds = crowd.meet()

    def run(place):
        asked = SAME | {"length": length} | (change if place == 1 else {})
        array = np.ones(asked.pop("length"), asked.pop("dtype"))
        worlds[place].all_reduce(asked.pop("op"), [array], **asked)

    start = time.monotonic()
    for error in crowd.failures(run):
        assert isinstance(error, ProgramMismatchError), repr(error)
        assert "worker 1" in str(error)
        assert "worker 0" in str(error) or "worker 2" in str(error)
    assert time.monotonic() - start < SOON_S


def test_member_that_another_one_refuses_tells_the_third_why(crowd):
    """The third may notice its end first, before it reads what the first one says."""
    worlds = crowd.meet()
    why = "worker 1 and worker 0 do not exchange the same values"
    refused = LinkLost(1, PeerEndedError(why, is_refusal=True))
    assert isinstance(worlds[2]._lost(refused, "a sum"), ProgramMismatchError)
    with pytest.raises(ProgramMismatchError, match=why):
        worlds[0].all_reduce("sum", [np.ones(8, np.float32)], step=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sum", [np.ones(3, "float32")] * 2), "2 arrays for its 1 replicas"),
        (("sum", [np.ones(3, bool)]), "sum of booleans"),
        (("max", [np.ones(3, "complex64")]), "complex numbers have no order"),
        (("sum", [np.ones(3, ml_dtypes.float8_e5m2)]), "float8_e5m2"),
        (("sum", [np.array(["a"])]), "<U1"),
    ],
)
def test_arrays_that_cannot_be_combined_are_refused_and_the_world_goes_on(crowd, arguments, said):
    worlds = crowd.meet()
    with pytest.raises(InvalidArgumentError, match=said):
        worlds[0].all_reduce(*arguments, step=0)
    results = crowd.each(lambda place: worlds[place].all_reduce("max", [np.array([place])], step=0))
    assert [int(result[0]) for result in results] == [2] * 3


def test_the_replicas_of_one_member_have_one_shape():
    rendezvous = Rendezvous("127.0.0.1", TOKEN)
    with contextlib.closing(rendezvous):
        world = rendezvous.meet(1, [Member(0, "worker 0", rendezvous.address, (0, 1))], 0, LIMIT_S)
        with pytest.raises(InvalidArgumentError, match=r"float32\[2\], float32\[3\]"):
            world.all_reduce("sum", [np.ones(3, np.float32), np.ones(2, np.float32)], step=0)


@pytest.mark.parametrize(
    ("held", "numbers"),
    [([(0,), (2,)], (0, 1)), ([(0,), (0,)], (0, 1)), ([(0,), (1,)], (0, 0)), ([(1, 0), (2,)], (0, 1))],
)
def test_each_replica_has_one_member(held, numbers):
    rendezvous = Rendezvous("127.0.0.1", TOKEN)
    with contextlib.closing(rendezvous):
        members = [Member(n, f"worker {n}", "127.0.0.1:1", h) for n, h in zip(numbers, held, strict=True)]
        with pytest.raises(InvalidArgumentError):
            rendezvous.meet(1, members, 0, LIMIT_S)


# --- ends ---------------------------------------------------------------------------------------------


def test_an_end_before_the_rendezvous_is_remembered(crowd):
    members = crowd.members()
    crowd.rendezvous[0].end(7, "worker 2 has died")
    for epoch in (3, 7):
        with pytest.raises(EpochEnded, match="worker 2 has died") as found:
            crowd.rendezvous[0].meet(epoch, members, 0, LIMIT_S)
        assert (found.value.epoch, found.value.lost) == (epoch, None)


def test_an_end_during_the_rendezvous_wakes_those_who_wait_for_a_member(crowd):
    members = crowd.members()
    waiting = crowd.start(
        lambda place: place == 2 or crowd.rendezvous[place].meet(1, members, place, LIMIT_S)
    )
    time.sleep(0.1)
    assert not any(future.done() for future in waiting[:2])
    start = time.monotonic()
    for rendezvous in crowd.rendezvous:
        rendezvous.end(1, "worker 2 does not come")
    for future in waiting[:2]:
        assert isinstance(future.exception(LIMIT_S), EpochEnded)
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_end_at_the_last_moment_of_the_rendezvous_is_not_missed(crowd, monkeypatch, moment):
    members, run = crowd.members(), Negotiation.run

    def end():
        for rendezvous in crowd.rendezvous:
            rendezvous.end(1, "a late end")

    def run_and_end(negotiation, **settings):
        if moment == "before":
            end()
        memory = run(negotiation, **settings)
        end()
        return memory

    monkeypatch.setattr(Negotiation, "run", run_and_end)
    errors = crowd.failures(lambda place: crowd.rendezvous[place].meet(1, members, place, LIMIT_S))
    assert all(isinstance(error, EpochEnded) for error in errors), errors
    reasons = [error.reason for error in errors]
    assert "a late end" in reasons
    # A member that the end reaches last may first see that another one has closed its connection.
    assert all(reason == "a late end" or "is not reached" in reason for reason in reasons), reasons


def test_members_meet_in_the_next_epoch_after_an_end(crowd):
    members = crowd.members()

    def run(place):
        crowd.rendezvous[place].end(2, "a test")
        world = crowd.rendezvous[place].meet(3, members, place, LIMIT_S)
        return float(world.all_reduce("sum", [np.ones(1)], step=0)[0])

    crowd.each(lambda place: crowd.rendezvous[place].meet(1, members, place, LIMIT_S))
    assert crowd.each(run) == [3.0] * 3


@pytest.mark.parametrize("length", [4, 3_000_000])
def test_an_end_during_an_exchange_wakes_all_members(crowd, length):
    worlds = crowd.meet()
    arrays = [np.ones(length, np.float32)]
    waiting = crowd.start(lambda place: place == 1 or worlds[place].all_reduce("sum", arrays, step=0))
    wait_until(lambda: worlds[0].awaited == worlds[2].awaited == "worker 1")
    start = time.monotonic()
    crowd.rendezvous[0].end(worlds[0].epoch, "worker 1 is silent")
    errors = [waiting[place].exception(LIMIT_S) for place in (0, 2)]
    assert all(isinstance(error, EpochEnded) for error in errors), errors
    assert errors[0].reason == "worker 1 is silent"
    assert errors[1].lost == 0  # whoever hears nothing of the end sees that another member has left
    assert time.monotonic() - start < SOON_S
    crowd.rendezvous[1].end(worlds[1].epoch, "worker 1 is silent")
    with pytest.raises(EpochEnded, match="worker 1 is silent"):
        worlds[1].all_reduce("sum", arrays, step=0)


def test_an_end_of_an_earlier_epoch_leaves_the_world_alone(crowd):
    worlds = crowd.meet()
    crowd.rendezvous[0].end(worlds[0].epoch - 1, "late news")
    results = crowd.each(lambda place: worlds[place].all_reduce("sum", [np.ones(1)], step=0))
    assert [float(result[0]) for result in results] == [3.0] * 3


def test_an_end_leaves_other_connections_of_the_process_alone(crowd):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        worlds = crowd.meet()
        crowd.rendezvous[0].end(worlds[0].epoch, "a test")
        ours.sendall(b"!")
        assert theirs.recv(1) == b"!"


@pytest.mark.parametrize("length", [4, 3_000_000])
def test_a_member_that_is_lost_ends_the_world_of_all_at_once(crowd, length):
    """Also of those that wait for another one."""
    worlds = crowd.meet()
    arrays = [np.ones(length, np.float32)]
    waiting = crowd.start(lambda place: place > 0 or worlds[0].all_reduce("sum", arrays, step=0))
    wait_until(lambda: worlds[0].awaited == "worker 1")
    start = time.monotonic()
    for _, link in worlds[2]._links.items():
        link.connection.cancel()  # as the system does for a process that is killed
    error = waiting[0].exception(LIMIT_S)
    assert isinstance(error, EpochEnded), repr(error)
    assert error.lost == 2
    assert "worker 2" in error.reason
    with pytest.raises(EpochEnded):
        worlds[1].all_reduce("sum", arrays, step=0)
    assert time.monotonic() - start < SOON_S


def test_a_member_that_takes_no_part_is_named_at_the_limit(crowd):
    worlds = crowd.meet(timeout_s=3.0)
    waiting = crowd.start(lambda place: place == 1 or worlds[place].all_reduce("sum", [np.ones(1)], step=5))
    errors = [waiting[place].exception(LIMIT_S) for place in (0, 2)]
    assert all(isinstance(error, EpochEnded) for error in errors)
    assert any("worker 1 did not take part in the sum of 1 float64" in error.reason for error in errors)


def test_a_member_that_does_not_come_is_named_at_the_limit(crowd):
    members = crowd.members()
    crowd.rendezvous[1].close()
    errors = crowd.failures(lambda place: place == 1 or crowd.rendezvous[place].meet(1, members, place, 1.0))
    for place in (0, 2):
        assert isinstance(errors[place], EpochEnded), repr(errors[place])
        assert errors[place].lost == 1
        assert "worker 1" in errors[place].reason


def test_members_that_were_told_different_members_do_not_form_a_world(crowd):
    lists = [crowd.members(), crowd.members([(0,), (2,), (1,)]), crowd.members()]
    errors = crowd.failures(lambda place: crowd.rendezvous[place].meet(1, lists[place], place, LIMIT_S))
    assert all(isinstance(error, EpochEnded) for error in errors)
    assert any("other members" in error.reason for error in errors)


def test_a_member_with_another_token_is_refused(crowd):
    members = crowd.members()
    stranger = Rendezvous("127.0.0.1", Security(b"another"))
    with contextlib.closing(stranger), pytest.raises(ClusterStartError, match="token"):
        stranger.meet(1, members, 2, LIMIT_S)


def test_a_closed_world_has_sent_its_last_sum(crowd):
    """A member may leave as soon as it has its sum."""
    worlds = crowd.meet()
    arrays = [np.ones(2_000_000, np.float32)]

    def last(place):
        result = worlds[place].all_reduce("sum", arrays, step=0)
        return float(result[-1])

    assert crowd.each(last) == [3.0] * 3
    crowd.each(lambda place: worlds[place].close())
    for world in worlds:
        with pytest.raises(EpochEnded, match="has left"):
            world.all_reduce("sum", arrays, step=1)
