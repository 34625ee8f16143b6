"""Functions scheduled on a cluster in memory: TensorFlow's contract, and what happens when tasks die."""

import gc
import itertools
import threading
import time

import jax
import numpy as np
import pytest

import replicax as rx
from memory_cluster import MemoryCluster, eventually
from replicax._ps.job import events_in, worker_state
from replicax._src.input.dataset import OutOfRangeError
from replicax._src.vocabulary.errors import (
    CancelledError,
    ClosureInputError,
    ContextError,
    InvalidArgumentError,
    RemoteError,
    StaleCoordinatorError,
    UnavailableError,
    WaitTimeoutError,
)
from replicax.coordinator import ClusterCoordinator

JOIN_S = 60.0

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def coordinator(cluster):
    with ClusterCoordinator(cluster) as coordinator:
        yield coordinator


def connected(coordinator):
    """Waits until all workers are connected."""
    eventually(lambda: all(w["connected"] for w in coordinator.statistics()["workers"].values()))


def queue_of(coordinator):
    return coordinator._loop._job._state.queue


def add(call, x, y=1):
    call.push()
    return x + y


def fail(call):
    raise ValueError("no luck")


def count_up(call, x):
    call.push(int(x))
    return x


def twos(worker):
    return itertools.repeat(np.int32(2))


def three(worker):
    return iter([np.int32(1), np.int32(2), np.int32(3)])


def broken(worker):
    raise OSError("no such file")


# --- the contract --------------------------------------------------------------------------------------


def test_results_come_back(coordinator):
    values = [coordinator.schedule(add, args=(n, 10)) for n in range(5)]
    coordinator.join(JOIN_S)
    assert coordinator.done()
    fetched = coordinator.fetch({"all": values, "other": "text"})
    assert fetched == {"all": [10, 11, 12, 13, 14], "other": "text"}
    assert isinstance(values[0].fetch(), np.ndarray)
    assert isinstance(values[0].get(), jax.Array)
    assert values[0].get() == 10


def test_schedule_join_schedule_join(cluster, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(twos))
    for expected in (10, 20):
        for _ in range(5):
            coordinator.schedule(count_up, args=(iterator,))
        coordinator.join(JOIN_S)
        coordinator.join(JOIN_S)  # nothing more to wait for
        assert coordinator.done()
        assert cluster.ps[0].counter == expected


def test_schedule_does_not_wait_and_done_is_false(cluster, coordinator):
    go = threading.Event()
    connected(coordinator)
    value = coordinator.schedule(lambda call: np.int32(go.wait(JOIN_S)))
    assert not coordinator.done()
    eventually(lambda: coordinator.statistics()["closures"]["in_flight"] == 1)
    with pytest.raises(WaitTimeoutError, match="1 scheduled functions are in flight"):
        coordinator.join(timeout_s=0.05)
    with pytest.raises(WaitTimeoutError, match="'<lambda>' had not run"):
        value.fetch(timeout_s=0.05)
    go.set()
    coordinator.join(JOIN_S)
    assert value.fetch() == 1


@pytest.mark.parametrize("way", ["join", "done", "schedule"])
def test_error_is_raised_once_by_the_next_call(cluster, coordinator, way):
    failed = coordinator.schedule(fail)
    with pytest.raises(RemoteError, match="ValueError: no luck"):
        failed.fetch(JOIN_S)
    with pytest.raises(RemoteError, match="no luck"):
        {
            "join": coordinator.join,
            "done": coordinator.done,
            "schedule": lambda: coordinator.schedule(add, (1,)),
        }[way]()
    assert coordinator.done()
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    coordinator.join(JOIN_S)
    with pytest.raises(RemoteError, match="no luck"):
        failed.fetch()


def test_an_error_cancels_the_queued_and_waits_for_what_is_in_flight(cluster, coordinator):
    go, begun = threading.Event(), threading.Event()

    def slow(call):
        begun.set()
        assert go.wait(JOIN_S)
        return np.int32(7)

    connected(coordinator)
    slow_value = coordinator.schedule(slow)
    assert begun.wait(JOIN_S)
    held = threading.Event()

    def late_failure(call):
        assert held.wait(JOIN_S)
        raise ValueError("no luck")

    coordinator.schedule(late_failure)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    held.set()
    with pytest.raises(CancelledError, match=r"The corresponding function is cancelled\. Please reschedule"):
        values[-1].fetch(JOIN_S)
    threading.Timer(0.2, go.set).start()
    with pytest.raises(RemoteError, match="no luck"):
        coordinator.join(JOIN_S)
    assert go.is_set()
    assert slow_value.fetch(0) == 7
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


def test_workers_continue_after_errors(coordinator):
    for _ in range(20):
        coordinator.schedule(fail)
        with pytest.raises(RemoteError, match="no luck"):
            coordinator.join(JOIN_S)
    values = [coordinator.schedule(add, (n,)) for n in range(20)]
    coordinator.join(JOIN_S)
    assert coordinator.fetch(values) == list(range(1, 21))


@pytest.fixture
def quick(cluster, coordinator, monkeypatch):
    """A quick function, so that closures of it travel in groups; and the event that its first call at -1 waits for."""
    monkeypatch.setattr(worker_state, "_DEPTHS", (8, 32))
    monkeypatch.setattr(worker_state, "_SLOW_S", 1000.0)
    go = threading.Event()

    def step(call, x):
        if x == 7:
            raise ValueError("no luck")
        if x == -1:
            assert go.wait(JOIN_S)
        call.push()
        return x

    connected(coordinator)
    for _ in range(40):
        coordinator.schedule(step, (0,))
    coordinator.join(JOIN_S)
    yield step, go
    go.set()


def both_waiting(cluster, coordinator, step):
    """Each worker runs a function that waits, and has another one queued."""
    for worker in cluster.workers:
        worker.ran.clear()
    for x in (-1, -1, 0, 0):
        coordinator.schedule(step, (x,))
    eventually(lambda: all(worker.ran for worker in cluster.workers))


def test_error_of_one_closure_does_not_affect_its_group(cluster, coordinator, quick):
    step, go = quick
    both_waiting(cluster, coordinator, step)
    values = [coordinator.schedule(step, (x,)) for x in range(8, 20)]
    failing = coordinator.schedule(step, (7,))
    values += [coordinator.schedule(step, (x,)) for x in range(20, 24)]
    before = cluster.ps[0].counter
    go.set()
    with pytest.raises(RemoteError, match="no luck"):
        coordinator.join(JOIN_S)
    with pytest.raises(RemoteError, match="no luck"):
        failing.fetch(0)
    (group,) = [b for worker in cluster.workers for b in worker.message_groups if 40 + 4 + 12 in b]
    assert len(group) > 1
    finished = [x for x, value in zip([*range(8, 20), *range(20, 24)], values, strict=True) if ran(value, x)]
    assert cluster.ps[0].counter == before + 4 + len(finished)
    assert {number for number in group if number != 56} <= {40 + 4 + x - 8 + (x >= 20) for x in finished}


def ran(value, expected):
    try:
        assert value.fetch(0) == expected
    except CancelledError:
        return False
    return True


def test_group_of_a_dead_worker_is_run_again_one_by_one(cluster, coordinator, quick):
    step, go = quick
    both_waiting(cluster, coordinator, step)
    values = [coordinator.schedule(step, (x,)) for x in range(10, 60)]
    for worker in cluster.workers:
        worker.message_groups.clear()
    before = cluster.ps[0].counter
    amid, push = [], cluster.ps[0].push

    def dying(closure, low, amount):
        push(closure, low, amount)
        for worker in cluster.workers:
            for group in worker.message_groups:
                if not amid and closure[1] == group[1]:
                    amid.extend(group)
                    worker.restart()  # after it has pushed

    cluster.ps[0].push = dying
    go.set()
    coordinator.join(JOIN_S)
    assert [value.fetch(0) for value in values] == list(range(10, 60))
    assert cluster.ps[0].counter == before + 4 + 50
    assert cluster.ps[0].duplicates >= 1
    assert coordinator.statistics()["closures"]["retried"] >= 2
    together = [group for worker in cluster.workers for group in worker.message_groups if group != amid]
    assert not any(set(amid[1:]) & set(group) for group in together)


@pytest.mark.parametrize("is_queued", [False, True])
def test_after_ctrl_c_in_schedule_each_function_still_runs_once(
    cluster, coordinator, quick, is_queued, monkeypatch
):
    step, _ = quick
    before, schedule = cluster.ps[0].counter, coordinator._loop.schedule

    def interrupted(*function):
        if is_queued:
            schedule(*function)
        raise KeyboardInterrupt

    where = (coordinator._loop, "schedule") if is_queued else (events_in, "Scheduled")
    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            coordinator.schedule(step, (100,))
    values = [coordinator.schedule(step, (x,)) for x in range(10, 30)]
    coordinator.join(JOIN_S)
    assert coordinator.fetch(values) == list(range(10, 30))
    assert cluster.ps[0].counter == before + is_queued + 20
    assert coordinator.statistics()["closures"]["queued"] == 0


def test_a_failure_that_ctrl_c_hides_is_raised_by_the_next_join(coordinator, monkeypatch):
    coordinator.schedule(fail)
    wait, main = threading.Event.wait, threading.current_thread()
    interrupts = [KeyboardInterrupt()]

    def interrupted(self, timeout=None):
        is_set = wait(self, timeout)
        if threading.current_thread() is main and interrupts:
            raise interrupts.pop()
        return is_set

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coordinator.join(JOIN_S)
    with pytest.raises(RemoteError, match="no luck"):
        coordinator.join(JOIN_S)
    coordinator.join(JOIN_S)


def test_a_full_queue_blocks_schedule(cluster, coordinator, monkeypatch):
    queue = queue_of(coordinator)
    monkeypatch.setattr(queue, "_capacity", 3)
    go = threading.Event()

    def wait(call):
        assert go.wait(JOIN_S)
        return np.int32(0)

    def schedule_all():
        for _ in range(12):
            coordinator.schedule(wait)

    thread = threading.Thread(target=schedule_all)
    thread.start()
    eventually(lambda: queue.is_full)
    thread.join(0.1)
    assert thread.is_alive()
    go.set()
    thread.join(JOIN_S)
    assert not thread.is_alive()
    coordinator.join(JOIN_S)
    assert coordinator.statistics()["closures"]["finished"] == 12


def test_remote_value_is_rejected_as_an_argument(coordinator):
    value = coordinator.schedule(add, (1,))
    for where in ((value,), ({"a": [value]},)):
        with pytest.raises(
            ValueError, match="RemoteValue` used as an input to scheduled function is not yet supported"
        ):
            coordinator.schedule(add, where)


def test_only_functions_are_scheduled(coordinator):
    with pytest.raises(InvalidArgumentError, match="got 3 as function"):
        coordinator.schedule(3)


def test_programs_and_constants_are_sent_once(cluster, coordinator):
    cluster.constants["c"] = np.arange(3.0)
    for _ in range(3):
        for n in range(20):
            coordinator.schedule(add, (n,))
        coordinator.join(JOIN_S)
    for worker in cluster.workers:
        assert len(worker.knows) == len(set(worker.knows))
        assert worker.knows in (["c", *worker.names], [])


def test_forgotten_program_is_sent_again(cluster, coordinator):
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    for worker in cluster.workers:
        worker.knows.clear()
    values = [coordinator.schedule(add, (n,)) for n in range(6)]
    assert coordinator.fetch(values) == [1, 2, 3, 4, 5, 6]


def test_program_that_workers_reject_is_an_error(cluster, coordinator):
    def odd(call):
        return np.int32(1)

    cluster.refused.add(f"odd {id(odd)}")
    value = coordinator.schedule(odd)
    with pytest.raises(RemoteError, match="cannot load odd"):
        coordinator.join(JOIN_S)
    with pytest.raises(RemoteError, match="cannot load odd"):
        value.fetch(0)


def test_low_water_mark_is_sent(cluster, coordinator):
    def low(call):
        return np.int32(call.low)

    for _ in range(5):
        coordinator.schedule(add, (1,))
    coordinator.join(JOIN_S)
    assert coordinator.schedule(low).fetch(JOIN_S) == 5


def test_values_written_by_others_are_read_again(cluster, coordinator):
    def epoch(call):
        return np.int32(call.epoch)

    first = coordinator.schedule(epoch)
    coordinator.join(JOIN_S)
    before = first.fetch(JOIN_S)
    second = coordinator.schedule(epoch)
    assert second.fetch(JOIN_S) > before, "join tells that all have run"
    assert second.fetch(JOIN_S) == second.get(JOIN_S)
    after = coordinator.schedule(epoch).fetch(JOIN_S)
    assert after > second.fetch(JOIN_S), "so does a result"
    assert len(cluster.epochs) == 5, "each is new once"


# --- one for each strategy -----------------------------------------------------------------------------


def test_there_is_one_for_each_strategy(cluster, coordinator):
    assert ClusterCoordinator(cluster) is coordinator
    assert coordinator.strategy is cluster
    with pytest.raises(InvalidArgumentError, match="max_staleness"):
        ClusterCoordinator(cluster, max_staleness=2)


def test_other_strategies_raise():
    with pytest.raises(InvalidArgumentError, match="OneDeviceStrategy"):
        ClusterCoordinator(rx.OneDeviceStrategy("cpu:0"))


def test_closed_coordinator_raises_and_a_new_one_can_be_made(cluster):
    coordinator = ClusterCoordinator(cluster)
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    begun, go = threading.Event(), threading.Event()

    def wait(call):
        begun.set()
        go.wait(JOIN_S)
        return np.int32(0)

    value = coordinator.schedule(wait)
    assert begun.wait(JOIN_S)
    coordinator.close()
    coordinator.close()
    with pytest.raises(CancelledError, match="coordinator was closed"):
        value.fetch(0)
    with pytest.raises(ContextError, match="ClusterCoordinator is closed"):
        coordinator.schedule(add, (1,))
    go.set()
    with ClusterCoordinator(cluster) as other:
        assert other is not coordinator
        before = cluster.ps[0].counter
        assert other.schedule(add, (1,)).fetch(JOIN_S) == 2
        assert (
            cluster.ps[0].counter == before + 1
        )  # a number that was used already would count as a duplicate


def test_deleted_coordinator_ends_its_threads(cluster):
    before = set(threading.enumerate())
    coordinator = ClusterCoordinator(cluster)
    value = coordinator.schedule(add, (1,))
    assert value.fetch(JOIN_S) == 2
    assert any(t.name == "replicax-coordinator" for t in threading.enumerate() if t not in before)
    del coordinator
    gc.collect()
    eventually(lambda: not any(t.name.startswith("replicax-") for t in set(threading.enumerate()) - before))
    assert value.fetch(0) == 2


def test_another_coordinator_takes_over(cluster, coordinator):
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    for task in (*cluster.workers, *cluster.ps):
        task.incarnation = "second"

    def train():
        for _ in range(1000):
            coordinator.schedule(add, (1,))
            time.sleep(0.005)
            coordinator.join(JOIN_S)

    with pytest.raises(StaleCoordinatorError):
        train()


# --- what each worker has of its own ------------------------------------------------------------------


def test_each_worker_reads_the_full_dataset_and_each_iterator_restarts(cluster, coordinator):
    dataset = coordinator.create_per_worker_dataset(three)
    iterator, other = iter(dataset), iter(dataset)
    first = [coordinator.schedule(count_up, (iterator,)) for _ in range(2)]
    second = coordinator.schedule(count_up, (other,))
    assert {int(value.fetch(JOIN_S)) for value in first} <= {1, 2}
    assert second.fetch(JOIN_S) == 1
    assert iterator.element_spec == jax.ShapeDtypeStruct((), np.int32)


def test_an_iterator_that_is_exhausted_is_out_of_range(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(three))

    def train():
        for _ in range(8):
            coordinator.schedule(lambda call, x: x, (iterator,))  # which raises once one has failed
        coordinator.join(JOIN_S)

    with pytest.raises(OutOfRangeError, match="no more elements"):
        train()


def test_next_outside_a_scheduled_function(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(twos))
    with pytest.raises(
        NotImplementedError, match="Iterating over an `AsyncDistributedIterator` is not supported"
    ):
        next(iterator)
    with pytest.raises(InvalidArgumentError, match=r"Pass an iterator of it, iter\(dataset\)"):
        coordinator.schedule(add, (coordinator.create_per_worker_dataset(twos),))


def test_per_worker_values(cluster, coordinator):
    value = coordinator.create_per_worker_value(lambda worker: np.float32(worker.index))
    got = [coordinator.schedule(lambda call, x: x - call.worker.index, (value,)) for _ in range(6)]
    assert coordinator.fetch(got) == [0.0] * 6


def test_a_dataset_that_cannot_be_made_is_an_error_at_join_and_fetch(cluster, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(broken))
    value = coordinator.schedule(count_up, (iterator,))
    with pytest.raises(ClosureInputError, match="OSError: no such file"):
        coordinator.join(JOIN_S)
    with pytest.raises(ClosureInputError, match="no such file"):
        value.fetch(0)
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


def test_unused_dataset_that_cannot_be_made_has_no_effect(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(broken))
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    coordinator.join(JOIN_S)
    del iterator


def test_a_dataset_that_one_worker_cannot_make(cluster, coordinator):
    def broken_on_the_first(worker):
        if worker.index == 0:
            raise OSError("no such file")
        return twos(worker)

    def step(call, x):
        time.sleep(0.01)
        return x

    connected(coordinator)
    iterator = iter(coordinator.create_per_worker_dataset(broken_on_the_first))

    def train():
        for _ in range(20):
            coordinator.schedule(step, (iterator,))
        coordinator.join(JOIN_S)

    with pytest.raises(ClosureInputError, match=r"worker 0 could not make .*no such file"):
        train()


def test_a_worker_needs_a_program_for_another_shape(cluster, coordinator):
    def ragged(worker):
        for n in (3, 3, 2, 3):
            yield np.ones(n, np.float32)

    cluster.workers[1].kill()
    iterator = iter(coordinator.create_per_worker_dataset(ragged))
    values = [coordinator.schedule(lambda call, x: x.sum(), (iterator,)) for _ in range(4)]
    assert sorted(coordinator.fetch(values)) == [2, 3, 3, 3]


def test_a_shape_that_cannot_be_traced_is_an_error(cluster, coordinator):
    cluster.unmakable.add('[[[[2], "float32"]]]')

    def ragged(worker):
        for n in (3, 2):
            yield np.ones(n, np.float32)

    cluster.workers[1].kill()
    iterator = iter(coordinator.create_per_worker_dataset(ragged))
    for _ in range(2):
        coordinator.schedule(lambda call, x: x.sum(), (iterator,))
    with pytest.raises(ValueError, match="cannot trace for"):
        coordinator.join(JOIN_S)


def test_unreferenced_resources_are_released(cluster, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(twos))
    eventually(lambda: all(worker.resources for worker in cluster.workers))
    del iterator
    gc.collect()
    other = coordinator.create_per_worker_value(lambda worker: np.int32(1))
    eventually(lambda: all(len(worker.resources) == 1 for worker in cluster.workers))
    del other


# --- faults --------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_between_functions(cluster, coordinator):
    for _ in range(2):
        coordinator.schedule(add, (1,))
        coordinator.join(JOIN_S)
        for worker in cluster.workers:
            worker.restart()
    assert cluster.ps[0].counter == 2
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


@pytest.mark.parametrize("has_pushed", [False, True])
def test_a_worker_that_is_killed_in_a_function(cluster, coordinator, has_pushed):
    victims = []

    def dies_once(call):
        if has_pushed:
            call.push()
        if not victims:
            victims.append(call.worker)
            call.worker.restart()
        if not has_pushed:
            call.push()
        return np.int32(5)

    values = [coordinator.schedule(dies_once) for _ in range(4)]
    coordinator.join(JOIN_S)
    assert cluster.ps[0].counter == 4
    assert coordinator.fetch(values) == [5] * 4
    connected(coordinator)
    assert coordinator.statistics()["closures"]["retried"] >= 1


def test_all_workers_are_killed_at_random_moments_and_nothing_counts_twice(cluster, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(twos))
    ended = threading.Event()

    def kill():
        random = np.random.default_rng(0)
        for _ in range(100):
            if ended.wait(random.uniform(0, 0.03)):
                return
            cluster.workers[random.integers(2)].restart()

    def step(call, x):
        time.sleep(0.001)
        call.push(int(x))
        return x

    thread = threading.Thread(target=kill)
    thread.start()
    num = 0
    while thread.is_alive():
        for _ in range(20):
            coordinator.schedule(step, (iterator,))
        num += 20
        coordinator.join(JOIN_S)
    ended.set()
    assert cluster.ps[0].counter == 2 * num
    assert coordinator.statistics()["closures"]["retried"] > 0


def test_a_function_that_kills_workers_is_an_error(cluster, coordinator):
    def killer(call):
        call.worker.restart()

    value = coordinator.schedule(killer)
    with pytest.raises(RemoteError, match=r"'killer'.* 3 "):
        coordinator.join(JOIN_S)
    with pytest.raises(RemoteError, match="kills workers"):
        value.fetch(0)
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


def test_worker_dies_while_making_a_dataset(cluster, coordinator):
    deaths = []

    def deadly(worker):
        if len(deaths) < 2:
            deaths.append(worker)
            worker.restart()
        return twos(worker)

    cluster.deadly = deadly
    iterator = iter(coordinator.create_per_worker_dataset(ByName("deadly")))
    for _ in range(3):
        coordinator.schedule(count_up, (iterator,))
    coordinator.join(JOIN_S)
    assert cluster.ps[0].counter == 6
    assert len(deaths) == 2


def test_a_dataset_function_that_kills_each_worker_is_an_error(cluster, coordinator):
    deaths = []

    def deadly(worker):
        deaths.append(worker)
        worker.restart()
        return twos(worker)

    cluster.deadly = deadly
    iterator = iter(coordinator.create_per_worker_dataset(ByName("deadly")))
    value = coordinator.schedule(count_up, (iterator,))
    says = r"function 'ByName' of dataset 'dataset \d+' probably kills workers: [34] of them died"
    with pytest.raises(ClosureInputError, match=says):
        coordinator.join(JOIN_S)
    with pytest.raises(ClosureInputError, match=says):
        value.fetch(0)
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2, "the workers are there for others"
    assert len(deaths) <= 4


class ByName:
    """A function of the cluster, which cannot be pickled with its closure."""

    def __init__(self, name):
        self.name = name

    def __call__(self, worker):
        return getattr(worker.cluster, self.name)(worker)


def test_dataset_restarts_after_a_failure(cluster, coordinator):
    cluster.workers[1].kill()
    iterator = iter(coordinator.create_per_worker_dataset(three))
    take = lambda call, x: x  # noqa: E731
    assert coordinator.schedule(take, (iterator,)).fetch(JOIN_S) == 1
    assert coordinator.schedule(take, (iterator,)).fetch(JOIN_S) == 2
    cluster.workers[0].restart()
    assert coordinator.schedule(take, (iterator,)).fetch(JOIN_S) in (1, 3)  # 3: before the death was noticed
    eventually(lambda: coordinator.statistics()["workers"]["worker 0"]["connections"] == 2)
    assert coordinator.schedule(take, (iterator,)).fetch(JOIN_S) in (1, 2)


def test_a_worker_that_stays_away_does_not_matter(cluster, coordinator):
    cluster.workers[0].kill()
    values = [coordinator.schedule(add, (n,)) for n in range(10)]
    coordinator.join(JOIN_S)
    assert coordinator.fetch(values) == list(range(1, 11))
    eventually(lambda: not coordinator.statistics()["workers"]["worker 0"]["connected"])


def test_a_killed_worker_and_an_error_at_once(cluster, coordinator):
    begun, go = threading.Event(), threading.Event()

    def slow(call):
        begun.set()
        go.wait(JOIN_S)
        return np.int32(0)

    slow_value = coordinator.schedule(slow)
    assert begun.wait(JOIN_S)
    (busy,) = [w for w in cluster.workers if w.ran]
    failed = coordinator.schedule(fail)
    with pytest.raises(RemoteError, match="no luck"):
        failed.fetch(JOIN_S)
    busy.restart()
    with pytest.raises(RemoteError, match="no luck"):
        coordinator.join(JOIN_S)
    with pytest.raises(CancelledError):
        slow_value.fetch(0)
    go.set()
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


def test_stopped_worker_is_given_up_and_its_late_answers_are_ignored(cluster, coordinator):
    stopped = []

    def stops_once(call):
        if not stopped:
            stopped.append(call.worker)
            call.worker.running.clear()
            call.worker.running.wait()
        call.push()
        return np.int32(call.worker.index)

    value = coordinator.schedule(stops_once)
    other = coordinator.schedule(add, (1,))
    coordinator.join(JOIN_S)
    assert value.fetch(0) == 1 - stopped[0].index
    assert other.fetch(0) == 2
    stopped[0].running.set()
    eventually(lambda: cluster.ps[0].duplicates == 1)
    assert cluster.ps[0].counter == 2
    connected(coordinator)
    assert value.fetch(0) == 1 - stopped[0].index


def test_a_long_function_is_no_failure(cluster, coordinator):
    def long(call):
        time.sleep(1.0)  # five times the time that a heartbeat may take
        return np.int32(1)

    assert coordinator.schedule(long).fetch(JOIN_S) == 1
    assert coordinator.statistics()["closures"]["retried"] == 0


def test_a_slow_worker_does_not_hold_others_back(cluster, coordinator):
    go = threading.Event()

    def step(call):
        if call.worker.index == 0:
            assert go.wait(JOIN_S)
        return np.int32(call.worker.index)

    values = [coordinator.schedule(step) for _ in range(30)]
    eventually(lambda: len(cluster.workers[1].ran) >= 28)
    go.set()
    coordinator.join(JOIN_S)
    assert coordinator.fetch(values).count(1) >= 28


def test_bounded_staleness_delays_fast_workers(cluster):
    go = threading.Event()

    def step(call):
        if call.worker.index == 0:
            assert go.wait(JOIN_S)
        return np.int32(0)

    with ClusterCoordinator(cluster, max_staleness=3) as coordinator:
        connected(coordinator)
        for _ in range(30):
            coordinator.schedule(step)
        eventually(lambda: len(cluster.workers[1].ran) == 4)
        time.sleep(0.1)
        assert len(cluster.workers[1].ran) == 4
        cluster.workers[0].kill()
        eventually(lambda: len(cluster.workers[1].ran) == 30)
        go.set()
        coordinator.join(JOIN_S)


def test_results_outlive_their_worker(cluster, coordinator):
    values = [coordinator.schedule(add, (n,)) for n in range(4)]
    coordinator.join(JOIN_S)
    for worker in cluster.workers:
        worker.kill()
    assert coordinator.fetch(values) == [1, 2, 3, 4]
    assert values[0].get() == 1


@pytest.mark.parametrize("moment", ["idle", "in a function", "while workers are away", "stopped"])
def test_a_lost_parameter_server_is_named(cluster, coordinator, moment):
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2
    go = threading.Event()
    if moment == "while workers are away":
        for worker in cluster.workers:
            worker.kill()
    if moment == "in a function":
        coordinator.schedule(lambda call: np.int32(go.wait(JOIN_S)))
    if moment == "stopped":
        cluster.ps[0].running.clear()
    else:
        cluster.ps[0].kill()
    began = time.monotonic()

    def train():
        for _ in range(10000):
            coordinator.schedule(add, (1,))
            time.sleep(0.001)
        coordinator.join(JOIN_S)

    with pytest.raises(UnavailableError, match="ps 0") as raised:
        train()
    assert time.monotonic() - began < JOIN_S
    assert raised.value.task == "ps 0"
    eventually(lambda: not coordinator.statistics()["ps"]["ps 0"]["connected"])
    with pytest.raises(UnavailableError, match="ps 0"):
        coordinator.join(JOIN_S)  # again, for as long as it is so
    go.set()


def test_a_parameter_server_that_was_only_stopped_is_used_again(cluster, coordinator):
    cluster.ps[0].running.clear()
    eventually(lambda: not coordinator.statistics()["ps"]["ps 0"]["connected"])
    with pytest.raises(UnavailableError, match="ps 0 is lost"):
        coordinator.join(JOIN_S)
    cluster.ps[0].running.set()
    eventually(lambda: coordinator.statistics()["ps"]["ps 0"]["connected"])
    eventually(lambda: not queue_of(coordinator).has_error)
    assert coordinator.schedule(add, (1,)).fetch(JOIN_S) == 2


def test_a_parameter_server_that_was_started_again_has_nothing(cluster, coordinator):
    eventually(lambda: coordinator.statistics()["ps"]["ps 0"]["statistics"])
    cluster.ps[0].restart()
    eventually(lambda: not coordinator.statistics()["ps"]["ps 0"]["connected"])
    with pytest.raises(UnavailableError, match="ps 0 is another process than before"):
        coordinator.join(JOIN_S)


def test_a_function_that_cannot_reach_a_server_for_a_moment_is_tried_again(cluster, coordinator):
    troubles = []

    def stumbles(call):
        if len(troubles) < 3:
            troubles.append(call)
            raise UnavailableError("ps 0 was away for a moment", "ps 0")
        return np.int32(1)

    assert coordinator.schedule(stumbles).fetch(JOIN_S) == 1
    troubles[:] = []

    def always(call):
        raise UnavailableError("ps 0 is away", "ps 0")

    coordinator.schedule(always)
    with pytest.raises(UnavailableError, match="ps 0 is away"):
        coordinator.join(JOIN_S)


@pytest.mark.usefixtures("fast")
def test_join_raises_if_all_workers_stay_away_too_long():
    cluster = MemoryCluster()
    for worker in cluster.workers:
        worker.kill()
    with ClusterCoordinator(cluster, reconnect_timeout_s=0.3) as coordinator:
        coordinator.schedule(add, (1,))
        with pytest.raises(UnavailableError, match=r"Could not reach worker \d for 0.3 s"):
            coordinator.join(JOIN_S)
    cluster.end()
