import itertools
import json
import logging

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.devices.autoshard import (
    AutoShardPolicy,
    DistributeOptions,
    NotEnoughFilesError,
    WorkerShare,
    choose_policy,
    rows_of_global_batch,
    rows_of_own_batch,
)
from replicax._src.devices.split import split_sizes
from replicax._src.input.files.constructors import from_text_lines
from replicax._src.input.opening import open_elements
from replicax._src.input.pipeline import SHARD_HINT, from_arrays
from replicax._src.input.sources import PerReplicaPulls, open_source
from replicax._src.vocabulary.errors import InvalidArgumentError

WORKERS = range(1, 9)
POLICY = AutoShardPolicy


def shares(num_workers, replicas_per_worker=1):
    return [
        WorkerShare(num_workers, worker, num_workers * replicas_per_worker) for worker in range(num_workers)
    ]


def steps_of(dataset, share, policy):
    """The rows of each replica of a worker, for each of its steps."""
    steps = []
    for step in open_source(dataset, share=share, policy=policy).iterate():
        ends = np.cumsum(step.sizes)
        steps.append(
            [
                step.tree.unflatten(step.arrays)[e - n : e].tolist()
                for n, e in zip(step.sizes, ends, strict=True)
            ]
        )
    return steps


@given(st.integers(0, 40), st.sampled_from(WORKERS), st.integers(1, 4))
def test_a_global_batch_has_one_place_for_each_row(num_rows, num_workers, replicas_per_worker):
    rows = [rows_of_global_batch(num_rows, share) for share in shares(num_workers, replicas_per_worker)]
    assert [row for r in rows for row in range(r.start, r.stop)] == list(range(num_rows))
    assert sum((r.sizes for r in rows), ()) == split_sizes(num_rows, num_workers * replicas_per_worker)


@given(st.integers(0, 40), st.sampled_from(WORKERS), st.integers(1, 4))
def test_batch_of_one_worker_is_split_into_steps(num_rows, num_workers, replicas_per_worker):
    for share in shares(num_workers, replicas_per_worker):
        steps = list(rows_of_own_batch(num_rows, share))
        assert [row for step in steps for row in range(step.start, step.stop)] == list(range(num_rows))
        assert all(step.stop > step.start for step in steps)
        assert all(len(step.sizes) == replicas_per_worker for step in steps)
        sizes = [size for step in steps for size in step.sizes]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.integers(1, 40), st.sampled_from(WORKERS), st.integers(1, 4))
def test_separate_batches_form_a_global_batch(num_rows, num_workers, replicas_per_worker):
    first = [
        next(rows_of_own_batch(num_rows, share), None) for share in shares(num_workers, replicas_per_worker)
    ]
    if num_rows >= num_workers * replicas_per_worker:
        assert sum(rows.stop - rows.start for rows in first) == num_rows


# tf.data's batch_sizes_for_worker, recorded from TensorFlow 2.21: G, W, R per worker, sizes by worker.
@pytest.mark.parametrize(
    ("num_rows", "num_workers", "replicas_per_worker", "sizes"),
    [
        (7, 2, 2, [[2, 2, 2, 1], [2, 1, 2, 2]]),
        (10, 3, 2, [[2, 2, 2, 2, 1, 1], [2, 2, 1, 1, 2, 2], [1, 1, 2, 2, 2, 2]]),
        (3, 2, 2, [[1, 1, 1, 0], [1, 0, 1, 1]]),
        (5, 1, 4, [[2, 1, 1, 1]]),
    ],
)
def test_sizes_equal_tensorflows(num_rows, num_workers, replicas_per_worker, sizes):
    for share, expected in zip(shares(num_workers, replicas_per_worker), sizes, strict=True):
        got = [size for rows in rows_of_own_batch(num_rows, share) for size in rows.sizes]
        assert got == expected


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "dataset", [from_arrays(np.arange(29)).batch(6), grain.MapDataset.range(29).batch(6)]
)
def test_data_gives_every_row_to_one_replica(num_workers, dataset):
    workers = [steps_of(dataset, share, POLICY.DATA) for share in shares(num_workers, 2)]
    assert {len(steps) for steps in workers} == {5}
    in_order = [
        row for step in zip(*workers, strict=True) for worker in step for part in worker for row in part
    ]
    assert in_order == list(range(29))
    for step, num_rows in zip(zip(*workers, strict=True), (6, 6, 6, 6, 5), strict=True):
        assert tuple(len(part) for worker in step for part in worker) == split_sizes(
            num_rows, 2 * num_workers
        )


@pytest.mark.parametrize("num_workers", WORKERS)
def test_off_keeps_each_workers_dataset(num_workers):
    for share in shares(num_workers, 2):
        mine = from_arrays(100 * share.worker_index + np.arange(11)).batch(4)
        rows = [row for step in steps_of(mine, share, POLICY.OFF) for part in step for row in part]
        assert rows == list(range(100 * share.worker_index, 100 * share.worker_index + 11))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_hint_is_the_worker(num_workers):
    hinted = from_arrays(np.arange(23)).shard(SHARD_HINT, SHARD_HINT).batch(4)
    for share in shares(num_workers):
        rows = [row for step in steps_of(hinted, share, POLICY.HINT) for part in step for row in part]
        assert rows == list(range(23))[share.worker_index :: num_workers]


def test_hints_have_no_effect_under_other_policies():
    hinted = from_arrays(np.arange(5)).shard(SHARD_HINT, SHARD_HINT).batch(5)
    assert steps_of(hinted, WorkerShare(), POLICY.AUTO) == [[[0, 1, 2, 3, 4]]]
    (first, second) = (steps_of(hinted, share, POLICY.DATA) for share in shares(2))
    assert [first, second] == [[[[0, 1, 2]]], [[[3, 4]]]]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("is_batched", [False, True])
def test_shards_of_arrays(num_workers, is_batched):
    rows = from_arrays(np.arange(23))
    dataset = rows.batch(2) if is_batched else rows
    elements = [np.asarray(e).tolist() for e in dataset]
    for index in range(num_workers):
        shard = dataset.shard(num_workers, index)
        assert [np.asarray(e).tolist() for e in shard] == elements[index::num_workers]
        assert len(shard) == len(elements[index::num_workers])


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 30),
    st.permutations(["shuffle", "shard", "repeat", "batch", "take"]),
)
def test_seeking_equals_reading_up_to_a_position(num_rows, batch_size, shards, index, repeats, start, steps):
    def make():
        dataset = from_arrays(np.arange(num_rows))
        for step in steps:
            dataset = {
                "shuffle": lambda d: d.shuffle(seed=3),
                "shard": lambda d: d.shard(shards, index % shards),
                "repeat": lambda d: d.repeat(repeats),
                "batch": lambda d: d.batch(batch_size),
                "take": lambda d: d.take(7),
            }[step](dataset)
        return dataset

    whole = [element.tolist() for element in make()]
    iterator, resumed = iter(make()), iter(make())
    before = [element.tolist() for element in itertools.islice(iterator, start)]
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    assert before + [element.tolist() for element in resumed] == whole
    assert len(make()) == len(whole)


@pytest.mark.parametrize("num_workers_after", [1, 4])
def test_a_shared_position_is_resumed_with_another_number_of_workers(num_workers_after):
    def steps_of_all(num_workers, state, count):
        """For each worker, its steps after a state, and the state then."""
        dataset = from_arrays(np.arange(30)).shuffle(seed=3).batch(8).repeat(2)
        shares = [WorkerShare(num_workers, worker, 4) for worker in range(num_workers)]
        passes = [open_source(dataset.filter(lambda x: True), share=share).iterate() for share in shares]
        for one_pass in passes if state is not None else ():
            one_pass.set_state(state)
        steps = [list(itertools.islice(one_pass, count)) for one_pass in passes]
        return [
            [int(row) for step in together for row in step.arrays[0]] for together in zip(*steps, strict=True)
        ], json.loads(json.dumps(passes[-1].get_state()))

    everything, _ = steps_of_all(2, None, None)
    before, state = steps_of_all(2, None, 5)
    after, _ = steps_of_all(num_workers_after, state, None)
    flat = lambda steps: [sorted(step) for step in steps]  # noqa: E731
    assert flat(before + after) == flat(everything)
    assert [len(step) for step in everything] == [8, 8, 8, 6] * 2


def choose(policy, num_workers=2, num_files=None, has_hint=False):
    share = WorkerShare(num_workers, 0, num_workers)
    return choose_policy(POLICY(policy), share, num_files, has_hint=has_hint, source="a list")


def test_auto():
    assert choose("AUTO", num_files=2).policy is POLICY.FILE
    assert choose("AUTO").policy is POLICY.DATA
    few = choose("AUTO", num_workers=3, num_files=2)
    assert few.policy is POLICY.DATA
    assert "2 files are not enough for 3 workers" in few.reason
    assert few.is_fallback
    assert "1 file is not enough for 2 workers" in choose("AUTO", num_files=1).reason
    assert not any(choice.is_fallback for choice in (choose("AUTO"), choose("AUTO", num_files=2)))
    assert choose("AUTO", num_workers=1, num_files=5).reason == "one worker reads everything"


def test_file_needs_files():
    with pytest.raises(NotEnoughFilesError, match="reads files, got a list"):
        choose("FILE")
    with pytest.raises(NotEnoughFilesError, match="each of the 2 workers, got 1"):
        choose("FILE", num_files=1)
    assert choose("FILE", num_workers=1).policy is POLICY.FILE


def test_hint_without_a_hint():
    assert "every worker reads everything" in choose("HINT").reason
    assert "gives each worker its part" in choose("HINT", has_hint=True).reason


def test_chosen_policy_is_one_log_line(caplog):
    caplog.set_level(logging.INFO, "replicax")
    source = open_source([np.arange(4)], share=WorkerShare(2, 1, 2))
    list(source.iterate())
    list(source.iterate())
    (record,) = caplog.records
    assert record.getMessage() == (
        "Input: a list of 1 elements, worker 1 of 2, policy DATA: AUTO: a list of 1 elements has no files, so every worker "
        "keeps its rows of each global batch."
    )


def test_options():
    assert DistributeOptions().auto_shard_policy is POLICY.AUTO
    assert DistributeOptions("data").auto_shard_policy is POLICY.DATA
    assert DistributeOptions().num_devices is None
    assert DistributeOptions("data", num_devices=2).num_devices == 2
    with pytest.raises(InvalidArgumentError, match="allowed are AUTO, FILE, DATA, HINT, OFF"):
        DistributeOptions("rows")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, 2), "worker_index must be at least 0 and less than num_workers=2, got 2"),
        ((2, -1, 2), "got -1"),
        ((0, 0, 1), "num_workers must be a whole number of at least 1, got 0"),
        ((2, 0, 3), "every worker to have the same number of replicas; got num_replicas=3"),
        ((2, 0, 0), "num_replicas=0"),
    ],
)
def test_impossible_shares(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        WorkerShare(*arguments)


@pytest.mark.parametrize(("num_shards", "index"), [(2, 2), (2, -1), (0, 0), (SHARD_HINT, 0)])
def test_impossible_shards(num_shards, index):
    with pytest.raises(InvalidArgumentError, match="num_shards"):
        from_arrays(np.arange(3)).shard(num_shards, index)


# --- cases recorded from TensorFlow 2.21 with two workers of one replica -------------------------------


def rows_of_workers(dataset, policy):
    """For each worker, the rows of each step."""
    return [[parts[0] for parts in steps_of(dataset, share, policy)] for share in shares(2)]


def test_mw_data():
    first, second = rows_of_workers(from_arrays(np.arange(8)).batch(3), POLICY.DATA)
    assert first == [[0, 1], [3, 4], [6]]
    assert second == [[2], [5], [7]]


def test_mw_files(tmp_path):
    for number in range(3):
        lines = range(3 * number, 3 * number + 3)
        (tmp_path / f"{number}.txt").write_text("".join(f"{line}\n" for line in lines))
    dataset = from_text_lines(str(tmp_path / "*.txt")).map(lambda line: np.int32(line)).batch(2)
    first, second = rows_of_workers(dataset, POLICY.FILE)
    assert first == [[0], [1], [2], [6], [7], [8]]
    assert second == [[3], [4], [5]]
    with pytest.raises(NotEnoughFilesError, match=r"2 workers.*1"):
        rows_of_workers(from_text_lines(str(tmp_path / "0.txt")).map(np.int32).batch(2), POLICY.FILE)


def test_mw_fn_partial():
    batches = from_arrays(np.arange(14)).batch(4)
    steps = [
        [
            parts[0].tolist()
            for parts in PerReplicaPulls([open_elements(batches.shard(2, worker))], 2).iterate()
        ]
        for worker in range(2)
    ]
    assert steps == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13]]]


def test_workers_that_shuffle_one_dataset_without_a_seed_are_warned_once(caplog):
    def opened(dataset, num_workers, policy):
        for share in shares(num_workers):
            open_source(dataset.batch(4), share=share, policy=policy)

    rows = from_arrays(np.arange(16))
    opened(rows.shuffle(seed=0), 2, POLICY.DATA)
    opened(rows.shuffle(), 1, POLICY.DATA)
    opened(rows.shuffle(), 2, POLICY.OFF)
    assert not caplog.messages
    opened(rows.shuffle().map(lambda row: row), 2, None)
    (told,) = caplog.messages
    assert "shuffle(seed=0)" in told
