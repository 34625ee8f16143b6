"""Distributed iterators: their threads, positions, errors, and steps taken together."""

import gc
import json
import signal
import threading
import time
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest

from replicax._src.input.dataset import ClosedIteratorError, DistributedDataset
from replicax._src.input.elements import NotResumableError
from replicax._src.input.files.constructors import from_csv
from replicax._src.input.pipeline import SHARD_HINT, from_arrays
from replicax._src.input.sources import PerReplicaPulls, open_source


class Lists:
    """Places rows as lists."""

    topology = SimpleNamespace(peers=None)

    def place(self, step):
        return jax.tree.map(lambda array: array.tolist(), step.tree.unflatten(step.arrays))

    def stack(self, steps, capacity):
        return [self.place(step) for step in steps]

    def signature(self, step):
        return step.sizes


class PartLists(Lists):
    def place(self, step):
        return [part.tolist() for part in step]


def distribute(dataset, num_replicas=2, **options):
    return DistributedDataset(open_source(dataset, num_replicas=num_replicas), Lists(), **options)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "replicax-prefetch"]


def assert_no_thread():
    gc.collect()  # errors of other tests hold their iterators
    deadline = time.monotonic() + 60
    while prefetch_threads():
        assert time.monotonic() < deadline, "a thread stayed"
        time.sleep(0.005)


# --- positions ----------------------------------------------------------------------------------------


def resumable():
    rows = np.arange(17)
    return {
        "arrays": lambda: from_arrays(rows).batch(4),
        "arrays shuffled": lambda: from_arrays(rows).shuffle(seed=3).batch(4),
        "arrays shuffled batches": lambda: from_arrays(rows).batch(4).shuffle(seed=3),
        "arrays repeated": lambda: from_arrays(rows).shuffle(seed=3).repeat(2).batch(4),
        "a shard of arrays": lambda: from_arrays(np.arange(40)).shard(2, 1).batch(3),
        "grain map": lambda: grain.MapDataset.range(17).shuffle(seed=5).batch(4),
        "grain iter": lambda: grain.MapDataset.range(17).to_iter_dataset().filter(lambda x: x % 5).batch(4),
        "list": lambda: [rows[i : i + 4] for i in range(0, 17, 4)],
    }


@pytest.mark.parametrize("kind", resumable())
def test_iterator_resumes_at_the_next_unseen_batch(kind):
    make = resumable()[kind]
    whole = distribute(make())
    expected = list(whole)
    after = list(whole)  # the second epoch, in another order where it is shuffled
    for position in range(len(expected) + 1):
        iterator = iter(distribute(make()))
        taken = [next(iterator) for _ in range(position)]
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = distribute(make())
        iterator = iter(resumed)
        iterator.set_state(state)
        assert taken + list(iterator) == expected
        assert list(resumed) == after


def test_seeds_that_were_drawn_are_in_the_position():
    make = lambda: from_arrays(np.arange(50)).shuffle().batch(8)  # noqa: E731
    first = distribute(make())
    iterator = iter(first)
    next(iterator)
    state = iterator.get_state()
    other = distribute(make())
    resumed = iter(other)
    resumed.set_state(state)
    assert list(resumed) == list(iterator)
    assert list(other) == list(first)


def test_rejected_state_changes_nothing():
    dataset, twin = (distribute(from_arrays(np.arange(20)).shuffle(seed=3).batch(4)) for _ in range(2))
    iterator, its_twin = iter(dataset), iter(twin)
    other = iter(distribute(from_arrays(np.arange(8)).batch(2))).get_state()
    with pytest.raises(NotResumableError, match="its steps is"):
        iterator.set_state(other)
    assert list(iterator) == list(its_twin)
    assert list(dataset) == list(twin)


def test_partly_rejected_state_changes_no_shuffle():
    def make(seed, size):
        rows = [from_arrays(np.arange(9)).shuffle(seed=seed).batch(2), from_arrays(np.arange(size)).batch(3)]
        return DistributedDataset(PerReplicaPulls.from_each(rows), PartLists())

    dataset, twin = make(1, 9), make(1, 9)
    iterator, its_twin = iter(dataset), iter(twin)
    with pytest.raises(NotResumableError):
        iterator.set_state(iter(make(2, 10)).get_state())
    assert list(iterator) == list(its_twin)
    assert list(dataset) in (
        list(twin),
        list(twin),
    )  # its shuffles are its own; an epoch may have been skipped


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_iterators_are_restored_in_any_order(order):
    dataset = distribute(from_arrays(np.arange(20)).shuffle(seed=3).batch(4))
    iterators = [iter(dataset), iter(dataset)]
    states = [iterator.get_state() for iterator in iterators]
    expected = [list(iterator) for iterator in iterators]
    after = list(dataset)
    again = distribute(from_arrays(np.arange(20)).shuffle(seed=3).batch(4))
    restored = [iter(again), iter(again)]
    for state in states:
        state["elements"]["iterator"]["passes"] = 2
    for number in order:
        restored[number].set_state(states[number])
    assert [list(iterator) for iterator in restored] == expected
    assert list(again) == after


@pytest.mark.parametrize("position", [-1, 6, "x", None])
def test_invalid_positions(position):
    iterator = iter(distribute([np.arange(2)] * 5))
    state = iterator.get_state()
    with pytest.raises(NotResumableError):
        iterator.set_state({**state, "elements": {**state["elements"], "iterator": position}})
    assert len(list(iterator)) == 5


def test_elements_read_ahead_do_not_count():
    iterator = iter(distribute(from_arrays(np.arange(40)).batch(2), buffer_size=8))
    assert next(iterator) == [0, 1]
    time.sleep(0.05)
    state = iterator.get_state()
    next(iterator)
    iterator.set_state(state)
    assert next(iterator) == [2, 3]


def test_position_in_an_infinite_dataset_is_reached_directly():
    dataset = distribute(from_arrays(np.arange(10)).shuffle(seed=0).batch(2).repeat())
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    state["elements"]["iterator"]["cursor"]["repetition"] = 10**12
    start = time.monotonic()
    iterator.set_state(state)
    next(iterator)
    assert time.monotonic() - start < 30


def test_positions_of_datasets_from_functions():
    make = lambda: DistributedDataset(  # noqa: E731
        PerReplicaPulls.from_each([from_arrays(np.arange(9)).batch(2), grain.MapDataset.range(9).batch(3)]),
        PartLists(),
    )
    whole = list(make())
    iterator = iter(make())
    next(iterator)
    resumed = iter(make())
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    assert list(resumed) == whole[1:]


class Reiterable:
    def __iter__(self):
        return iter([np.arange(4), np.arange(4)])


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ((x for x in [np.arange(2)]), "a generator goes through its elements once"),
        (Reiterable(), "nothing says that its __iter__ yields the same again"),
    ],
)
def test_get_state_raises_without_a_position(dataset, text):
    iterator = iter(distribute(dataset))
    next(iterator)
    with pytest.raises(NotResumableError, match=text):
        iterator.get_state()


def test_states_of_other_datasets_raise():
    other = iter(distribute(from_arrays(np.arange(8)).batch(2)))
    next(other)
    iterator = iter(distribute(from_arrays(np.arange(9)).batch(2)))
    assert next(iterator) == [0, 1]
    for state in (other.get_state(), {"version": 1, "elements": "?"}, {"version": 2}, None):
        with pytest.raises(NotResumableError, match="state"):
            iterator.set_state(state)
    assert next(iterator) == [2, 3]  # it stayed where it was


# --- threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        lambda iterator: iterator.close(),
        lambda iterator: iterator.__exit__(None, None, None),
        lambda iterator: iterator.initialize(),
        lambda iterator: list(iterator),
    ],
)
def test_threads_end(end):
    iterator = iter(distribute(from_arrays(np.arange(40)).batch(2)))
    assert_no_thread()
    next(iterator)
    assert len(prefetch_threads()) == 1
    end(iterator)
    assert_no_thread()


def test_the_thread_ends_with_the_iterator():
    iterator = iter(distribute(from_arrays(np.arange(4)).batch(2).repeat()))
    next(iterator)
    del iterator
    gc.collect()
    assert_no_thread()


def test_loop_left_early_leaves_no_thread():
    for element in distribute(from_arrays(np.arange(4)).batch(2).repeat()):
        assert element == [0, 1]
        break
    gc.collect()
    assert_no_thread()


def test_closed_iterator_raises():
    with iter(distribute(from_arrays(np.arange(4)).batch(2))) as iterator:
        next(iterator)
    iterator.close()
    for call in (
        lambda: next(iterator),
        iterator.get_next,
        iterator.get_next_as_optional,
        iterator.initialize,
        iterator.get_state,
        lambda: iterator.take_stacked(2, 2),
    ):
        with pytest.raises(ClosedIteratorError, match="was closed"):
            call()


def test_errors_keep_their_type_and_name_their_source():
    def broken():
        yield np.arange(2)
        raise KeyError("no such file")

    iterator = iter(distribute(broken()))
    assert next(iterator) == [0, 1]
    with pytest.raises(KeyError, match="no such file") as caught:
        next(iterator)
    assert any("read ahead" in note and "generator" in note for note in caught.value.__notes__)
    with pytest.raises(StopIteration):
        next(iterator)


def test_batch_is_unchanged_if_the_generator_reuses_its_array():
    def reusing():
        batch = np.zeros(4)
        for number in range(6):
            batch[:] = number
            yield batch

    pulled = DistributedDataset(PerReplicaPulls.from_one(reusing(), 2), PartLists())
    assert [element[0] for element in distribute(reusing())] == [0, 1, 2, 3, 4, 5]
    assert [[part[0] for part in element] for element in pulled] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("places_ahead", [True, False])
def test_elements_wait_on_the_devices_or_on_the_host(places_ahead):
    placed = []

    class Noting(Lists):
        def place(self, step):
            placed.append(threading.current_thread().name)
            return super().place(step)

    source = open_source(from_arrays(np.arange(6)).batch(2))
    dataset = DistributedDataset(source, Noting(), places_ahead=places_ahead)
    assert list(dataset) == [[0, 1], [2, 3], [4, 5]]
    assert set(placed) == {"replicax-prefetch" if places_ahead else threading.current_thread().name}
    assert ("on the devices" if places_ahead else "on the host") in repr(dataset)


# --- steps taken together -----------------------------------------------------------------------------


def taken(iterator, *calls):
    """The slices that each call takes from the steps of the group."""
    results = []
    for group_size, num_steps in calls:
        group = iterator.take_stacked(group_size, num_steps)
        results.append(group.value[group.start : group.stop])
    return results


def test_groups():
    iterator = iter(distribute(from_arrays(np.arange(11)).batch(2)))
    assert taken(iterator, (2, 2), (2, 2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert taken(iterator, (2, 2), (2, 2)) == [[[8, 9]], [[10]]]  # another shape is another group
    with pytest.raises(StopIteration):
        iterator.take_stacked(2, 2)


def test_a_part_of_a_group():
    iterator = iter(distribute(from_arrays(np.arange(10)).batch(2)))
    assert taken(iterator, (4, 1), (4, 4)) == [[[0, 1]], [[2, 3], [4, 5], [6, 7]]]
    assert iterator.get_state()["elements"]["position"] == 4


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_single_steps_and_groups_alternate_without_losing_one(pause_s):
    iterator = iter(distribute(from_arrays(np.arange(61)).batch(2)))
    seen = []
    calls = [(3, 2), None, (3, 1), (3, 3), None, None, (5, 5), (2, 2), None]
    for call in calls:
        seen += [next(iterator)] if call is None else taken(iterator, call)[0]
        assert iterator.get_state()["elements"]["position"] == len(seen)
        time.sleep(pause_s)
    assert [row for element in seen for row in element] == list(range(2 * len(seen)))
    seen += list(iterator)
    assert [row for element in seen for row in element] == list(range(61))


class SlowOrBroken(list):
    """A list of batches whose elements take time, or fail the first time."""

    def __init__(self, num_batches, seconds=(), broken=()):
        super().__init__(np.full(2, number) for number in range(num_batches))
        self.seconds, self.broken = dict(seconds), set(broken)

    def __getitem__(self, index):
        if not isinstance(index, slice):
            time.sleep(self.seconds.get(index, 0))
            if index in self.broken:
                self.broken.remove(index)
                raise OSError(f"element {index}")
        return super().__getitem__(index)


def numbers(steps):
    return [step[0] for step in steps]


@pytest.mark.parametrize("group_size", [1, 2, 5])
def test_error_comes_after_earlier_steps_and_the_next_call_continues(group_size):
    iterator = iter(distribute(SlowOrBroken(7, broken=[3])))
    seen, errors = [], []
    while True:
        try:
            seen += numbers(taken(iterator, (group_size, group_size))[0])
        except OSError as error:
            errors.append((str(error), list(seen)))
        except StopIteration:
            break
    assert seen == list(range(7))
    assert errors == [("element 3", [0, 1, 2])]


def test_single_steps_continue_after_an_error():
    iterator = iter(distribute(SlowOrBroken(6, broken=[2])))
    assert numbers([next(iterator), next(iterator)]) == [0, 1]
    with pytest.raises(OSError, match="element 2"):
        next(iterator)
    assert iterator.get_state()["elements"]["position"] == 2
    assert numbers(iterator) == [2, 3, 4, 5]


def test_slow_elements_do_not_disturb_a_change_to_groups():
    iterator = iter(distribute(SlowOrBroken(12, seconds={3: 0.5, 8: 0.5})))
    assert numbers([next(iterator)]) == [0]
    seen = [0]
    for call in ((4, 4), (4, 1), None, (3, 3), None, (2, 2)):
        seen += numbers([next(iterator)]) if call is None else numbers(taken(iterator, call)[0])
    assert seen + numbers(iterator) == list(range(12))


def test_a_group_need_not_be_full_for_the_thread_to_end(monkeypatch):
    monkeypatch.setattr("replicax._src.input.prefetch._CLOSE_TIMEOUT_S", 100)
    with iter(distribute(SlowOrBroken(5000, seconds=dict.fromkeys(range(5000), 0.01)))) as iterator:
        iterator.take_stacked(20, 20)
        next(iterator)
        iterator.take_stacked(4500, 1)  # of what was read as single steps; the thread reads 4500 together now
        time.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 30
    assert_no_thread()


def test_an_interrupt_while_waiting_loses_nothing():
    may_go_on = threading.Event()

    class Held(SlowOrBroken):
        def __getitem__(self, index):
            if index == 2:
                may_go_on.wait(60)
            return super().__getitem__(index)

    iterator = iter(distribute(Held(6)))
    assert numbers([next(iterator), next(iterator)]) == [0, 1]

    def interrupt(*_):
        raise KeyboardInterrupt

    def soon_interrupted(wait):  # however late this thread has its turn
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        wait()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for wait in (lambda: next(iterator), lambda: iterator.take_stacked(2, 2)):
            with pytest.raises(KeyboardInterrupt):
                soon_interrupted(wait)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        may_go_on.set()
    assert numbers(iterator) == [2, 3, 4, 5]


def test_several_threads_share_an_iterator():
    iterator = iter(distribute(from_arrays(np.arange(4000)).batch(2)))
    seen = [[], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(iterator)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(row for mine in seen for element in mine for row in element) == list(range(4000))


def test_closing_wakes_a_thread_that_waits():
    iterator = iter(distribute(SlowOrBroken(3, seconds={0: 0.5})))
    errors = []

    def wait():
        try:
            next(iterator)
        except ClosedIteratorError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    iterator.close()
    waiting.join(60)
    assert not waiting.is_alive()


# --- what people see ----------------------------------------------------------------------------------


def test_print():
    assert repr(distribute(from_arrays(np.arange(10)).batch(4), 3)) == "\n".join(
        [
            "DistributedDataset",
            "  source:   arrays of 10 rows",
            "  batch:    4 rows, (2, 1, 1) over 3 replicas",
            "  policy:   AUTO: one worker reads everything",
            "  shard:    0 of 1",
            "  steps:    3",
            "  prefetch: 16 steps, on the devices",
        ]
    )
    endless = repr(distribute(grain.MapDataset.range(8).batch(4, drop_remainder=True).repeat(), 2))
    assert "a grain.MapDataset" in endless
    assert "4 rows, 2 on each of 2 replicas" in endless
    assert "without end" in endless
    assert "prefetch: 2 steps, on the devices" in endless
    generator = repr(distribute(iter([])))
    assert "as they come, cut over 2 replicas" in generator
    assert "not known beforehand" in generator


@pytest.mark.parametrize(
    ("row_bytes", "buffer_size", "num_ahead"),
    [(8, 1, 16), (2**17, 1, 4), (2**20, 1, 2), (2**20, 5, 6), (8, 20, 21)],
)
def test_small_batches_in_memory_are_read_further_ahead(row_bytes, buffer_size, num_ahead):
    rows = from_arrays(np.zeros((40, row_bytes // 8)))
    dataset = distribute(rows.batch(2), buffer_size=buffer_size)
    assert f"prefetch: {num_ahead} steps" in repr(dataset)
    assert len(list(dataset)) == 20


def test_print_of_datasets_from_functions():
    pulls = PerReplicaPulls.from_one(from_arrays(np.arange(9)).batch(2), 2)
    assert "each of 2 replicas" in repr(DistributedDataset(pulls, Lists()))


def test_one_warning_counts_the_dropped_rows(caplog):
    pulls = PerReplicaPulls.from_one(from_arrays(np.arange(11)), 4)
    dataset = DistributedDataset(pulls, PartLists())
    assert len(list(dataset)) == len(list(dataset)) == 2
    (record,) = caplog.records
    assert "the last step has 3 elements for 4 replicas" in record.getMessage()
    batches = PerReplicaPulls.from_one(from_arrays(np.arange(13)).batch(4, drop_remainder=True), 2)
    list(DistributedDataset(batches, PartLists()))
    assert "1 element (4 rows) for 2 replicas" in caplog.records[-1].getMessage()


def test_epochs_differ_even_if_the_dataset_is_distributed_for_each(tmp_path):
    (tmp_path / "rows.csv").write_text("x\n" + "\n".join(map(str, range(40))))
    for rows in (
        from_arrays(np.arange(40)).shuffle(seed=0),
        from_arrays(np.arange(40)).shard(SHARD_HINT, SHARD_HINT).shuffle(seed=0),
        from_csv(tmp_path / "rows.csv").shuffle(40, seed=0),
    ):
        batches = rows.batch(40)
        epochs = [jax.tree.leaves(list(distribute(batches))) for _ in range(3)]  # the rows
        assert epochs[0] != epochs[1] != epochs[2]
        assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
