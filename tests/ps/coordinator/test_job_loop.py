"""The thread that owns a job: its failures, Ctrl-C, callers in many threads, its end, and what it keeps."""

import contextlib
import dis
import functools
import gc
import itertools
import logging
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from memory_cluster import MemoryCluster, Prepared, eventually
from replicax._ps.coordinator import cluster_coordinator, job_loop, scheduled_work
from replicax._ps.coordinator.scheduled_work import Work
from replicax._ps.job import actions_out as actions
from replicax._ps.job import events_in as events
from replicax._ps.job.limits import Limits
from replicax._src.vocabulary.errors import (
    CancelledError,
    ClosureInputError,
    ContextError,
    RemoteError,
    UnavailableError,
    WaitTimeoutError,
)
from replicax.coordinator import ClusterCoordinator

SOON_S = 10.0  # what takes milliseconds on a quiet machine

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def coordinator(cluster):
    with ClusterCoordinator(cluster) as coordinator:
        yield coordinator


@pytest.fixture
def quiet(monkeypatch):
    """No heartbeat wakes the owner."""
    monkeypatch.setattr(
        cluster_coordinator, "Limits", lambda reconnect_s: Limits(heartbeat_s=3600.0, reconnect_s=reconnect_s)
    )


@pytest.fixture
def quiet_coordinator(quiet):
    cluster = MemoryCluster(1)
    with ClusterCoordinator(cluster) as coordinator:
        connected(coordinator)
        yield coordinator
    cluster.end()


def connected(coordinator):
    eventually(lambda: all(w["connected"] for w in coordinator.statistics()["workers"].values()))


def add(call, x=1):
    call.push()
    return np.int32(x)


def fail(call):
    raise ValueError("no luck")


def twos(worker):
    return itertools.repeat(np.int32(2))


def nothing_left(loop):
    """True if the loop keeps nothing of functions that have ended."""
    return not (loop._values or loop._works or loop._waiting or loop._by_header or loop._events)


def in_threads(function, num_threads):
    """Calls ``function(n)`` in that many threads at once, and raises the first error."""
    errors, barrier = [], threading.Barrier(num_threads)

    def run(n):
        try:
            barrier.wait(SOON_S)
            function(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call does not end"
    if errors:
        raise errors[0]


# --- the owner fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [1, 2, 3])
def test_owner_that_fails_between_two_results_ends_all_functions(quiet_coordinator, monkeypatch, which):
    """The job has taken those for settled whose action was not carried out."""
    coordinator = quiet_coordinator
    go, num_settled = threading.Event(), itertools.count(1)
    assemble_for = Work.assemble_for

    def assemble(work, answer):
        if next(num_settled) == which:
            raise RuntimeError("broken owner")
        return assemble_for(work, answer)

    def slow(call):
        assert go.wait(60)
        return np.int32(1)

    monkeypatch.setattr(Work, "assemble_for", assemble)
    values = [coordinator.schedule(slow) for _ in range(5)]

    def join():
        with pytest.raises(RuntimeError, match="broken owner"):
            coordinator.join()

    waiting = threading.Thread(target=join, daemon=True)
    waiting.start()
    go.set()
    for n, value in enumerate(values, 1):
        if n < which:
            assert value.fetch(SOON_S) == 1
        else:
            with pytest.raises(RuntimeError, match="broken owner"):
                value.fetch(SOON_S)
    waiting.join(SOON_S)
    assert not waiting.is_alive()
    for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(add)):
        with pytest.raises(RuntimeError, match="broken owner"):
            call()
    assert coordinator.statistics()["closures"]["scheduled"] == 5
    eventually(lambda: nothing_left(coordinator._loop))


def test_functions_of_one_answer_end_if_the_owner_fails_at_one_of_them(cluster, coordinator):
    loop, settled = coordinator._loop, []
    connected(coordinator)
    coordinator.schedule(add).fetch(SOON_S)

    class Value:
        def __init__(self, is_bad=False):
            self.is_bad = is_bad

        def settle(self, arrays, error=None, assemble=None):
            if self.is_bad and error is None:
                raise RuntimeError("broken owner")
            settled.append((self, error))

    values = [Value(), Value(is_bad=True), Value()]

    def act():
        for number, value in enumerate(values, 1000):
            loop._values[number] = value
        loop._act([actions.Settle(number) for number in range(1000, 1003)])

    loop.put(act)
    eventually(lambda: len(settled) == 3)
    assert [(value, type(error)) for value, error in settled] == [
        (values[0], type(None)),
        (values[1], RuntimeError),
        (values[2], RuntimeError),
    ]


@pytest.mark.parametrize("error", [RuntimeError("broken owner"), SystemExit(3), KeyboardInterrupt()])
def test_any_error_of_the_owner_ends_the_job(cluster, coordinator, error):
    cluster.workers[0].running.clear()
    cluster.workers[1].running.clear()
    values = [coordinator.schedule(add) for _ in range(10)]

    def raises():
        raise error

    coordinator._loop.put(raises)
    for value in values:
        with pytest.raises(type(error)):
            value.fetch(SOON_S)
    with pytest.raises(type(error)):
        coordinator.join(SOON_S)
    for worker in cluster.workers:
        worker.running.set()
    coordinator.close()
    assert not coordinator._loop._thread.is_alive()
    with ClusterCoordinator(cluster) as following:
        assert following.schedule(add, (2,)).fetch(SOON_S) == 2


def test_owner_that_fails_twice_ends_and_leaves_no_wait(cluster, coordinator):
    loop = coordinator._loop
    loop._carry_out[actions.Settle] = loop._carry_out[actions.EndWait] = lambda action: 1 / 0
    values = []
    with contextlib.suppress(ZeroDivisionError, ContextError):  # the owner may fail before all are scheduled
        while len(values) < 10:
            values.append(coordinator.schedule(add))
    assert values
    for value in values:
        with pytest.raises(ZeroDivisionError):
            value.fetch(SOON_S)
    with pytest.raises((ZeroDivisionError, WaitTimeoutError)):
        coordinator.join(SOON_S)
    loop._thread.join(SOON_S)
    assert not loop._thread.is_alive()
    assert loop.is_closed


def test_log_that_raises_leaves_no_future_and_no_wait(cluster, coordinator):
    def refuse(record):
        raise OSError("the disk is full")

    connected(coordinator)
    for worker in cluster.workers:
        worker.running.clear()
    values = [coordinator.schedule(add) for _ in range(4)]
    logger = logging.getLogger("replicax")
    logger.addFilter(refuse)
    try:
        for value in values:
            with pytest.raises(OSError, match="disk is full"):
                value.fetch(SOON_S)
        with pytest.raises(OSError, match="disk is full"):
            coordinator.join(SOON_S)
    finally:
        logger.removeFilter(refuse)


def test_late_event_that_fails_ends_no_other(cluster, coordinator):
    coordinator.close()
    loop, ran = coordinator._loop, []

    def index_error():
        raise IndexError

    with loop._after_end:
        for function in (index_error, lambda: ran.append(1), index_error, lambda: ran.append(2)):
            loop._events.append(function)
    loop.put(lambda: ran.append(3))
    assert ran == [1, 2, 3]
    assert not loop._events


# --- Ctrl-C --------------------------------------------------------------------------------------------

_LOOKS_AFTER = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_METHOD", "RESUME", "JUMP_BACKWARD"}
_FILES = (job_loop.__file__, cluster_coordinator.__file__)


@functools.cache
def _names(code):
    return {each.offset: each.opname for each in dis.get_instructions(code)}


class Interrupted:
    """Raises KeyboardInterrupt at the n-th place of this file's calls where Python looks for signals.

    Attributes:
      has_come: True if there was such a place.
    """

    def __init__(self, n):
        self.left, self.has_come = n, False
        self.last = {}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in _FILES or self.has_come:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last = self.last.get(id(frame))
            self.last[id(frame)] = _names(frame.f_code).get(frame.f_lasti)
            if last in _LOOKS_AFTER:
                self.left -= 1
                if self.left < 0:
                    self.has_come = True
                    raise KeyboardInterrupt
        else:  # "exception", "return", or "call"
            self.last.pop(id(frame), None)
        return self.trace


def interrupted_everywhere(call):
    """Yields after each interrupt of ``call``: at its first place, at its second, and so on."""
    for n in itertools.count():
        with Interrupted(n) as interrupt:
            with contextlib.suppress(KeyboardInterrupt):
                call()
        if not interrupt.has_come:
            assert n > 10
            return
        yield n


@pytest.mark.parametrize("way", ["join", "done", "schedule"])
def test_ctrl_c_anywhere_keeps_a_failure_that_was_not_raised(cluster, coordinator, way):
    call = {"join": coordinator.join, "done": coordinator.done, "schedule": lambda: coordinator.schedule(add)}
    for n in itertools.count():
        with pytest.raises(RemoteError):
            coordinator.schedule(fail).fetch(SOON_S)
        with Interrupted(n) as interrupt:
            try:
                call[way]()
                raised = "nothing"
            except KeyboardInterrupt as error:
                is_shown = isinstance(error.__context__, RemoteError)
                raised = "failure" if is_shown else "interrupt"
            except RemoteError:
                raised = "failure"
        if raised != "failure":
            assert raised == "interrupt", (n, raised)
            with pytest.raises(RemoteError, match="no luck"):
                coordinator.join(SOON_S)
        coordinator.join(SOON_S)
        assert coordinator.schedule(add, (n,)).fetch(SOON_S) == n
        if not interrupt.has_come:
            break
    assert n > 10
    eventually(lambda: not coordinator._loop._waiting)


def test_ctrl_c_anywhere_in_schedule_leaves_the_job_usable(cluster, coordinator):
    num_whole = 0
    for n in interrupted_everywhere(lambda: coordinator.schedule(add)):
        assert coordinator.schedule(add, (n,)).fetch(SOON_S) == n
        num_whole += 1
    coordinator.join(SOON_S)
    assert num_whole <= cluster.ps[0].counter <= 2 * num_whole + 1
    assert coordinator._loop._job.num_queued == 0


def test_ctrl_c_anywhere_in_join_leaves_the_job_usable(cluster, coordinator):
    for n in interrupted_everywhere(lambda: coordinator.join(SOON_S)):
        assert coordinator.schedule(add, (n,)).fetch(SOON_S) == n
    eventually(lambda: not coordinator._loop._waiting)


def test_ctrl_c_anywhere_in_close_leaves_a_close_that_works(fast):
    for n in itertools.count():
        cluster = MemoryCluster(1)
        coordinator = ClusterCoordinator(cluster)
        value = coordinator.schedule(lambda call: time.sleep(0.01))
        with Interrupted(n) as interrupt:
            with contextlib.suppress(KeyboardInterrupt):
                coordinator.close()
        began = time.monotonic()
        coordinator.close()
        assert time.monotonic() - began < SOON_S
        assert not coordinator._loop._thread.is_alive()
        with contextlib.suppress(CancelledError):
            value.fetch(SOON_S)
        cluster.end()
        if not interrupt.has_come:
            break
    assert n > 5


def test_failure_that_came_after_ctrl_c_is_not_lost_with_the_wait(cluster, coordinator, monkeypatch):
    """The caller could not even say that it waits no longer."""
    go = threading.Event()

    class Waited:
        def wait(self, timeout_s):
            raise KeyboardInterrupt

    def slow(call):
        assert go.wait(60)
        raise ValueError("no luck")

    coordinator.schedule(slow)
    loop, put = coordinator._loop, coordinator._loop.put

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_loop._Waiting, "__init__", lambda self: setattr(self, "is_over", Waited()))
        patch.setattr(
            loop, "put", lambda item: interrupted() if isinstance(item, events.WaitGivenUp) else put(item)
        )
        with contextlib.suppress(KeyboardInterrupt):
            coordinator.join()
    go.set()
    eventually(lambda: not loop._job._waits._waits and loop._job._state.queue.has_error)
    with pytest.raises(RemoteError, match="no luck"):
        coordinator.join(SOON_S)


def test_owner_takes_functions_soon_although_its_bell_was_not_rung(quiet_coordinator, monkeypatch):
    """Ctrl-C came between the note that the owner is awake, and the bell."""
    loop = quiet_coordinator._loop
    for _ in range(3):
        eventually(lambda: loop._is_asleep)
        monkeypatch.setattr(loop._readable, "ring", lambda: None)
        assert quiet_coordinator.schedule(add, (5,)).fetch(SOON_S) == 5
        monkeypatch.undo()


# --- callers in many threads ---------------------------------------------------------------------------


def test_functions_of_many_threads_run_in_the_order_of_their_numbers(fast):
    cluster = MemoryCluster(1)
    with ClusterCoordinator(cluster) as coordinator:
        values = [[] for _ in range(8)]

        def schedule(n):
            for _ in range(100):
                values[n].append(coordinator.schedule(add, (n,)))

        in_threads(schedule, 8)
        coordinator.join(60)
        assert all(each.fetch(SOON_S) == n for n, mine in enumerate(values) for each in mine)
        assert cluster.ps[0].counter == 800
        ran = cluster.workers[0].ran
        assert ran == sorted(ran)
        eventually(lambda: nothing_left(coordinator._loop))
    cluster.end()


def test_all_calls_of_many_threads_end(cluster, coordinator):
    def use(n):
        for turn in range(20):
            value = coordinator.schedule(fail if (turn + n) % 7 == 0 else add)
            for call, *arguments in ((coordinator.done,), (coordinator.join, SOON_S), (value.fetch, SOON_S)):
                with contextlib.suppress(RemoteError, CancelledError):
                    call(*arguments)
            coordinator.statistics()

    def tolerant(n):
        try:
            use(n)
        except (RemoteError, CancelledError):
            tolerant(n)

    in_threads(tolerant, 6)
    eventually(lambda: nothing_left(coordinator._loop))


def test_thousands_of_functions_wait_for_the_first_worker(fast):
    cluster = MemoryCluster(2)
    for worker in cluster.workers:
        worker.kill()
    with ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(add, (n,)) for n in range(5000)]
        assert coordinator.statistics()["closures"]["queued"] == 5000
        for worker in cluster.workers:
            worker.start()
        coordinator.join(60)
        assert [int(value.fetch(SOON_S)) for value in values] == list(range(5000))
        assert cluster.ps[0].counter == 5000
        eventually(lambda: nothing_left(coordinator._loop))
    cluster.end()


def test_callers_wait_for_room_while_the_queue_is_full(fast, monkeypatch):
    cluster = MemoryCluster(1)
    cluster.workers[0].kill()
    with ClusterCoordinator(cluster) as coordinator:
        monkeypatch.setattr(coordinator._loop._job._state.queue, "_capacity", 10)
        values = []

        def schedule(n):
            for _ in range(20):
                values.append(coordinator.schedule(add))

        threads = threading.Thread(target=lambda: in_threads(schedule, 3), daemon=True)
        threads.start()
        eventually(lambda: len(values) >= 10)
        time.sleep(0.1)
        assert len(values) < 20
        cluster.workers[0].start()
        threads.join(60)
        coordinator.join(60)
        assert cluster.ps[0].counter == 60
    cluster.end()


# --- the end -------------------------------------------------------------------------------------------


def test_close_in_many_threads_at_once(cluster):
    coordinator = ClusterCoordinator(cluster)
    values = [coordinator.schedule(add) for _ in range(100)]
    in_threads(lambda n: coordinator.close(), 8)
    assert not coordinator._loop._thread.is_alive()
    for value in values:
        with contextlib.suppress(CancelledError):
            value.fetch(SOON_S)
    with pytest.raises(ContextError, match="closed"):
        coordinator.schedule(add)


@pytest.mark.parametrize("num_threads", [1, 6])
def test_close_while_other_threads_schedule_ends_every_function_and_wait(cluster, num_threads):
    for _ in range(5):
        close_while_scheduling(ClusterCoordinator(cluster), num_threads)


def close_while_scheduling(coordinator, num_threads):
    values = []

    def schedule(n):
        if not n:
            time.sleep(0.02)
            coordinator.close()
            return
        with contextlib.suppress(ContextError, CancelledError):
            while True:
                values.append(coordinator.schedule(add))
                if not len(values) % 10:
                    coordinator.join(SOON_S)

    in_threads(schedule, 1 + num_threads)
    for value in values:
        with contextlib.suppress(CancelledError):
            value.fetch(SOON_S)
    eventually(lambda: nothing_left(coordinator._loop))


def test_close_in_the_owner_does_not_wait_for_the_owner(cluster):
    """A handler of the log may call it."""
    coordinator, took_s = ClusterCoordinator(cluster), []
    connected(coordinator)

    def close():
        began = time.monotonic()
        coordinator.close()
        took_s.append(time.monotonic() - began)

    coordinator._loop.put(close)
    eventually(lambda: took_s)
    assert took_s[0] < 1.0
    coordinator._loop._thread.join(SOON_S)
    assert not coordinator._loop._thread.is_alive()
    coordinator.close()


def test_close_while_a_worker_is_silent_at_the_opening(cluster):
    cluster.workers[0].running.clear()
    coordinator = ClusterCoordinator(cluster)
    value = coordinator.schedule(lambda call: np.int32(1))
    time.sleep(0.05)
    began = time.monotonic()
    coordinator.close()
    assert time.monotonic() - began < SOON_S
    with contextlib.suppress(CancelledError):
        value.fetch(SOON_S)


@pytest.mark.parametrize("who", ["tracing", "caller"])
def test_close_while_a_function_is_traced(cluster, monkeypatch, who):
    coordinator = ClusterCoordinator(cluster)
    loop, begun, go = coordinator._loop, threading.Event(), threading.Event()

    def made(work, signature, session):
        begun.set()
        if who == "tracing":
            coordinator.close()
        assert go.wait(60)
        raise ValueError("too late")

    monkeypatch.setattr(Work, "made", made)
    loop._session.worker_platforms = ("another",)
    value = coordinator.schedule(add)
    assert begun.wait(SOON_S)
    monkeypatch.setattr(job_loop, "_END_S", 0.2)
    loop.close()
    with pytest.raises(CancelledError):
        value.fetch(SOON_S)
    go.set()
    loop.join_threads()
    assert not loop._threads._threads
    eventually(lambda: nothing_left(loop))
    coordinator.close()


def test_late_outcomes_change_nothing(cluster):
    coordinator = ClusterCoordinator(cluster)
    connected(coordinator)
    coordinator.schedule(add).fetch(SOON_S)
    coordinator.close()
    loop = coordinator._loop
    before = coordinator.statistics()["closures"]
    for event in (
        events.Answered(1, {}),
        events.Failed(2, UnavailableError("late", "worker 0")),
        events.WorkerAnswered("worker 0", 1, [{}]),
        events.WorkerBroke("worker 0", 1, UnavailableError("late", "worker 0")),
        events.TimePassed(),
        events.ResourceDropped("dataset 7"),
        events.VariablesMade(3),
        events.Closed(),
    ):
        loop.put(event)
    loop.drop("dataset 8")
    assert coordinator.statistics()["closures"] == before
    eventually(lambda: nothing_left(loop))
    for call in (coordinator.join, coordinator.done):
        call()


def test_next_coordinator_of_a_strategy_goes_on(cluster):
    session = cluster.session
    numbers = []
    type(cluster).session, kept = property(lambda _: session), type(cluster).session
    try:
        for n in range(4):
            coordinator = ClusterCoordinator(cluster)
            for _ in range(5):
                coordinator.schedule(add, (n,))
            coordinator.join(SOON_S)
            assert session.note_variables == coordinator._loop.note_variables
            numbers.append(coordinator._loop._job.next_number)
            if n % 2:
                coordinator.close()
            else:
                coordinator._loop.close()  # and the next one waits for its end
    finally:
        coordinator.close()
        type(cluster).session = kept
    assert cluster.ps[0].counter == 20
    assert cluster.ps[0].duplicates == 0
    assert numbers == sorted(set(numbers))
    session.note_variables(3)


def test_ended_loop_leaves_the_next_one_its_session(cluster):
    with ClusterCoordinator(cluster) as coordinator:
        session, heard = coordinator._loop._session, []
        session.note_variables = heard.append  # of the next loop
    session.note_variables(3)
    assert heard == [3]


# --- what it keeps -------------------------------------------------------------------------------------


def test_nothing_is_kept_of_functions_that_have_ended(cluster, coordinator):
    for n in range(500):
        coordinator.schedule(fail if n == 250 else add, () if n == 250 else (n,))
        if n % 50 == 0:
            try:
                coordinator.join(SOON_S)
            except RemoteError:
                continue
    try:
        coordinator.join(SOON_S)
    except RemoteError:
        coordinator.join(SOON_S)
    go = threading.Event()
    coordinator.schedule(lambda call: np.int32(go.wait(60)))
    with pytest.raises(WaitTimeoutError):
        coordinator.join(0.01)
    go.set()
    coordinator.join(SOON_S)
    loop = coordinator._loop
    eventually(lambda: nothing_left(loop))
    assert not loop._job._state.unsettled
    assert not loop._job._waits._waits
    assert all(not link._awaited and not link._num_bytes for link in loop._links.values())


def test_dropped_resources_are_forgotten(cluster, coordinator):
    loop = coordinator._loop
    for _ in range(5):
        iterator = iter(coordinator.create_per_worker_dataset(twos))
        assert coordinator.schedule(lambda call, x: x, args=(iterator,)).fetch(SOON_S) == 2
        del iterator
        gc.collect()
    eventually(lambda: not loop._resources)
    eventually(lambda: all(not worker.resources for worker in cluster.workers))


def test_spec_of_a_dataset_is_known_although_its_only_iterator_was_dropped(cluster, coordinator):
    dataset = coordinator.create_per_worker_dataset(twos)
    iter(dataset)
    gc.collect()
    assert dataset.element_spec.dtype == np.int32
    assert coordinator.schedule(lambda call, x: x, args=(iter(dataset),)).fetch(SOON_S) == 2


def test_iterators_of_many_threads_differ(cluster, coordinator):
    dataset, iterators = coordinator.create_per_worker_dataset(twos), []
    in_threads(lambda n: iterators.append(iter(dataset)), 8)
    assert len({each.resource for each in iterators}) == 8


# --- functions that are traced again -------------------------------------------------------------------


def test_functions_scheduled_before_a_worker_of_another_platform_connected_are_made_for_it(
    cluster, coordinator
):
    loop, go = coordinator._loop, threading.Event()
    connected(coordinator)
    busy = [coordinator.schedule(lambda call: np.int32(go.wait(60))) for _ in cluster.workers]
    values = [coordinator.schedule(add, (n,)) for n in range(50)]
    loop._session.worker_platforms = ("another", "cpu")
    go.set()
    assert [int(value.fetch(SOON_S)) for value in (*busy, *values)] == [1, 1, *range(50)]
    assert cluster.ps[0].counter == 50
    eventually(lambda: nothing_left(loop))


def test_functions_whose_variables_have_moved_are_prepared_again(cluster, coordinator, monkeypatch):
    go, is_valid = threading.Event(), {}
    connected(coordinator)
    monkeypatch.setattr(Prepared, "is_valid", lambda self: is_valid.get(self, True))
    monkeypatch.setattr(
        scheduled_work.SendableFunction, "is_stale", lambda self, session: not self.prepared.is_valid()
    )
    monkeypatch.setattr(Work, "made", made_again)
    busy = [coordinator.schedule(lambda call: np.int32(go.wait(60))) for _ in cluster.workers]
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    for work in list(coordinator._loop._works.values())[2:]:
        is_valid[work.sendable.prepared] = False
    go.set()
    assert [int(value.fetch(SOON_S)) for value in (*busy, *values)] == [1, 1, *range(20)]
    assert len(is_valid) == 20


def made_again(work, signature, session):
    prepared = work.sendable.prepared
    if not prepared.is_valid():
        prepared = work._prepare()
    prepared.make(signature)
    return scheduled_work.SendableFunction.of(prepared, session)


def test_function_that_stays_stale_fails(cluster, coordinator, monkeypatch):
    monkeypatch.setattr(scheduled_work.SendableFunction, "is_stale", lambda self, session: True)
    with pytest.raises(RemoteError, match="asked 17 times"):
        coordinator.schedule(add).fetch(SOON_S)


# --- garbage collection --------------------------------------------------------------------------------


def test_coordinator_with_waiting_functions_is_collected(fast):
    cluster = MemoryCluster(1)
    cluster.workers[0].kill()
    coordinator = ClusterCoordinator(cluster)
    loop, value = coordinator._loop, coordinator.schedule(add)
    gone = weakref.ref(coordinator)
    del coordinator
    gc.collect()
    assert gone() is None
    with pytest.raises(CancelledError):
        value.fetch(SOON_S)
    loop._thread.join(SOON_S)
    assert not loop._thread.is_alive()
    cluster.end()


def test_resource_is_dropped_wherever_garbage_is_collected(cluster, coordinator):
    """Also while a caller has the lock of the numbers."""
    loop = coordinator._loop
    with loop._scheduling, loop._after_end:
        loop.drop("dataset of nobody")
    with pytest.raises(ClosureInputError):
        loop.spec("dataset of nobody", SOON_S)


def test_a_coordinator_of_two_workers_and_two_servers_has_few_threads():
    cluster, before = MemoryCluster(num_workers=2, num_ps=2), set(threading.enumerate())

    def num_threads():
        return sum(t.name.startswith("replicax") for t in threading.enumerate() if t not in before)

    with ClusterCoordinator(cluster) as coordinator:
        connected(coordinator)
        coordinator.schedule(add).fetch(SOON_S)
        # Those that have connected it are idle, and end. With that of the session's heartbeats there are 6.
        eventually(lambda: 2 <= num_threads() <= 5, 30.0)
    cluster.end()


def test_functions_wait_while_the_system_has_no_more_threads(fast, monkeypatch):
    cluster, start = MemoryCluster(), threading.Thread.start

    def refused(thread):
        if thread.name == "replicax-requests":
            raise RuntimeError("can't start new thread")
        start(thread)

    with ClusterCoordinator(cluster) as coordinator:
        connected(coordinator)
        monkeypatch.setattr(threading.Thread, "start", refused)
        values = [coordinator.schedule(add) for _ in range(20)]
        time.sleep(0.3)
        monkeypatch.setattr(threading.Thread, "start", start)
        coordinator.join(SOON_S)
        assert len([value.fetch(SOON_S) for value in values]) == 20
    cluster.end()


def test_a_log_handler_may_ask_for_the_statistics(fast, caplog):
    cluster, told = MemoryCluster(), []

    class Handler(logging.Handler):
        def emit(self, record):
            told.append(coordinator.statistics())

    with ClusterCoordinator(cluster) as coordinator:
        connected(coordinator)
        handler = Handler()
        logging.getLogger("replicax").addHandler(handler)
        try:
            cluster.workers[0].restart()
            eventually(lambda: told, SOON_S)
        finally:
            logging.getLogger("replicax").removeHandler(handler)
    assert told[0]["workers"]["worker 0"]["connections"] == 1
    cluster.end()
