"""Distributed iterators: their threads, positions, errors, and steps taken together."""

import gc
import json
import threading
import time

import grain
import jax
import numpy as np
import pytest

from replicax._src.input.arrays import SHARD_HINT, from_arrays
from replicax._src.input.dataset import ClosedIteratorError, DistributedDataset
from replicax._src.input.elements import NotResumableError
from replicax._src.input.files.constructors import from_csv
from replicax._src.input.sources import PerReplicaPulls, open_source


class Lists:
    """Places rows as lists."""

    def place(self, step):
        return jax.tree.map(lambda array: array.tolist(), step.nest)

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
    deadline = time.monotonic() + 5
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
def test_it_goes_on_at_the_next_unseen_batch(kind):
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


def test_what_was_read_ahead_does_not_count():
    iterator = iter(distribute(from_arrays(np.arange(40)).batch(2), buffer_size=8))
    assert next(iterator) == [0, 1]
    time.sleep(0.05)
    state = iterator.get_state()
    next(iterator)
    iterator.set_state(state)
    assert next(iterator) == [2, 3]


def test_a_position_without_end_is_reached_without_walking():
    dataset = distribute(from_arrays(np.arange(10)).shuffle(seed=0).batch(2).repeat())
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    state["elements"]["position"] = 5 * 10**12 + 1
    start = time.monotonic()
    iterator.set_state(state)
    next(iterator)
    assert time.monotonic() - start < 2


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
def test_where_there_is_no_position_it_says_so(dataset, text):
    iterator = iter(distribute(dataset))
    next(iterator)
    with pytest.raises(NotResumableError, match=text):
        iterator.get_state()


def test_states_of_other_datasets_are_refused():
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
    assert not prefetch_threads()
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


def test_a_loop_that_is_left_leaves_no_thread():
    for element in distribute(from_arrays(np.arange(4)).batch(2).repeat()):
        assert element == [0, 1]
        break
    gc.collect()
    assert_no_thread()


def test_a_closed_iterator_says_so():
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


def test_errors_keep_their_type_and_say_where_they_come_from():
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


def test_a_batch_is_kept_when_the_generator_writes_the_next_one_over_it():
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
    """For each call what it took: the steps of the group from start to stop."""
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
def test_single_steps_and_groups_take_turns_without_losing_one(pause_s):
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


def test_an_error_stays_behind_the_steps_before_it():
    def broken():
        yield np.arange(2)
        yield np.arange(2)
        raise ValueError("late")

    iterator = iter(distribute(broken(), buffer_size=4))
    next(iterator)
    time.sleep(0.05)  # the thread has met the error
    assert taken(iterator, (1, 1)) == [[[0, 1]]]
    with pytest.raises(ValueError, match="late"):
        iterator.take_stacked(1, 1)


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
    assert "each of 2 replicas takes one element of one dataset in turn" in repr(
        DistributedDataset(pulls, Lists())
    )


def test_one_warning_counts_what_is_left_out(caplog):
    pulls = PerReplicaPulls.from_one(from_arrays(np.arange(11)), 4)
    dataset = DistributedDataset(pulls, PartLists())
    assert len(list(dataset)) == len(list(dataset)) == 2
    (record,) = caplog.records
    assert "the last step has 3 elements for 4 replicas" in record.getMessage()
    batches = PerReplicaPulls.from_one(from_arrays(np.arange(13)).batch(4, drop_remainder=True), 2)
    list(DistributedDataset(batches, PartLists()))
    assert "1 element (4 rows) for 2 replicas" in caplog.records[-1].getMessage()


def test_epochs_differ_also_where_the_dataset_is_distributed_anew_for_each(tmp_path):
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
