"""Positions in files, saved by some workers and restored by another number of workers: no row is lost or seen twice."""

import collections
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from checks import examples
from numbered_files import make_numbers, rows_in
from replicax._src.checkpoint.agreement import agreed_state
from replicax._src.devices.autoshard import AutoShardPolicy, WorkerShare
from replicax._src.input.elements import END, OF_WORKERS
from replicax._src.input.sources import open_source

AUTO, DATA, FILE = (AutoShardPolicy(name) for name in ("AUTO", "DATA", "FILE"))


class Workers:
    """Workers that take steps together, and their positions as a checkpoint has them."""

    def __init__(self, make, num_workers, saved=None, policy=AUTO):
        shares = [WorkerShare(num_workers, worker, 2 * num_workers) for worker in range(num_workers)]
        self.passes = [open_source(make(), share=share, policy=policy).iterate() for share in shares]
        self.steps = []
        for worker, one in enumerate(self.passes if saved else ()):
            states = json.loads(saved)
            if len(states) == 1:
                one.set_state(states[0])
            else:
                one.set_state(states[worker] if len(states) == num_workers else {OF_WORKERS: states})

    def take(self, num_steps=None):
        """Takes steps, and returns their rows."""
        rows = []
        for _ in itertools.count() if num_steps is None else range(num_steps):
            steps = [step for step in (next(one, END) for one in self.passes) if step is not END]
            self.steps.append(sum(len(rows_in([step])) for step in steps))
            if not steps:
                break
            rows.extend(rows_in(steps))
        return rows

    def save(self):
        return json.dumps(agreed_state([one.get_state() for one in self.passes]))


PIPELINES = {
    "batch": (1, lambda rows, size: rows.batch(size)),
    "shuffle": (1, lambda rows, size: rows.shuffle(5, seed=3).batch(size)),
    "own seeds": (1, lambda rows, size: rows.shuffle(5).batch(size)),
    "two shuffles": (1, lambda rows, size: rows.shuffle(3, seed=1).shuffle(4, seed=2).batch(size)),
    "shuffle repeat batch": (3, lambda rows, size: rows.shuffle(4, seed=3).repeat(3).batch(size)),
    "shuffle batch repeat": (3, lambda rows, size: rows.shuffle(4, seed=3).batch(size).repeat(3)),
    "maps": (
        2,
        lambda rows, size: (
            rows.map(lambda row: {"n": row["n"] + 1})
            .filter(lambda row: row["n"] > 0)
            .shuffle(4, seed=3)
            .repeat(2)
            .batch(size)
            .map(lambda batch: {"n": batch["n"] - 1})
        ),
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@examples(40, short=20)
@given(
    kind=st.sampled_from(["lines", "parquet", "array_records"]),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    batch_size=st.integers(1, 9),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    last=st.integers(1, 4),
)
def test_every_row_is_seen_once(tmp_path_factory, pipeline, kind, sizes, batch_size, runs, last):
    times, steps = PIPELINES[pipeline]
    folder = tmp_path_factory.mktemp("files")
    if pipeline == "own seeds":  # with the policy DATA all workers need the same order
        sizes = [*sizes, 3, 2, 1]
    rows, numbers = make_numbers(folder, kind, sizes)
    seen, saved = [], None
    for num_workers, num_steps in runs:
        workers = Workers(lambda: steps(rows, batch_size), num_workers, saved)
        seen += workers.take(num_steps)
        saved = workers.save()
    seen += Workers(lambda: steps(rows, batch_size), last, saved).take()
    assert collections.Counter(seen) == dict.fromkeys(itertools.chain(*numbers), times)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=3),
)
def test_dropped_remainders_repeat_no_row(tmp_path_factory, sizes, runs):
    rows, _ = make_numbers(tmp_path_factory.mktemp("files"), "lines", sizes)
    seen, saved = [], None
    for num_workers, num_steps in [*runs, (2, None)]:
        workers = Workers(lambda: rows.batch(3, drop_remainder=True).repeat(2), num_workers, saved)
        seen += workers.take(num_steps)
        saved = workers.save()
    assert max(collections.Counter(seen).values(), default=0) <= 2
    assert len(seen) >= 2 * (sum(sizes) - 2 * 3 * (len(runs) + 1)), (
        "each worker drops at most two rows per epoch"
    )


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=2, max_size=3),
)
def test_same_number_resumes_in_the_same_order(tmp_path_factory, sizes, runs):
    """This also holds in the rest of an epoch that workers in other numbers have begun."""
    rows, _ = make_numbers(tmp_path_factory.mktemp("files"), "lines", sizes)
    saved = None
    for num_workers, num_steps in runs:
        make = lambda: rows.shuffle(4, seed=3).repeat(2).batch(4)  # noqa: E731
        workers = Workers(make, num_workers, saved)
        workers.take(num_steps)
        saved = workers.save()
        again = Workers(make, num_workers, saved)
        assert again.save() == saved
        assert again.take(3) == workers.take(3)
        assert again.take() == workers.take()


def test_later_passes_divide_the_files_as_usual(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [5, 5, 5, 5])
    dataset = rows.shuffle(4, seed=3).batch(4)
    two = Workers(lambda: dataset, 2)
    two.take(1)
    saved = two.save()
    resumed = [rows.shuffle(4, seed=9).batch(4) for _ in range(3)]
    made = iter(resumed)
    Workers(lambda: next(made), 3, saved).take()
    fresh = Workers(lambda: rows.shuffle(4, seed=3).batch(4), 3)
    fresh.take()
    later = [
        open_source(one, share=WorkerShare(3, worker, 3)).iterate() for worker, one in enumerate(resumed)
    ]
    for worker, one in enumerate(later):
        assert sorted(rows_in(one)) == sorted(range(5 * worker, 5 * worker + 5)) + [
            15 + i for i in range(5)
        ] * (worker == 0)


def test_work_is_divided_over_the_new_workers(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [8] * 8)
    one = Workers(lambda: rows.batch(4), 1)
    one.take(1)
    workers = Workers(lambda: rows.batch(4), 4, one.save())
    counts = [len(rows_in(each)) for each in workers.passes]
    assert counts == [4 + 8, 16, 16, 16]


def test_unread_rows_of_other_workers_are_not_read_again(tmp_path):
    """The files that nobody has begun are read once, and those that are over are not opened."""
    rows, _ = make_numbers(tmp_path, "lines", [4, 4, 4, 4])
    workers = Workers(lambda: rows.batch(4), 2)
    workers.take(2)  # the files 0 and 1
    saved = workers.save()
    for done in ("part-000", "part-001"):
        size = (tmp_path / done).stat().st_size
        (tmp_path / done).write_text("x" * (size - 1) + "\n")
    assert sorted(Workers(lambda: rows.batch(4), 3, saved).take()) == list(range(8, 16))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (lambda rows: rows.take(9).batch(2), r"take\(count=9\)"),
        (lambda rows: rows.shard(2, 0).batch(2), "shard"),
        (lambda rows: rows.batch(2).shuffle(2, seed=0), "shuffle"),
        (lambda rows: rows.repeat(2).shuffle(2, seed=0).batch(2), "shuffle"),
        (lambda rows: rows.repeat(2).batch(2).repeat(2), "repeat"),
        (lambda rows: rows.batch(2).filter(lambda batch: True), "filter"),
    ],
    ids=["take", "shard", "shuffled-batches", "shuffled-repeats", "two-repeats", "filtered-batches"],
)
def test_steps_whose_position_cannot_be_divided(tmp_path, steps, said):
    rows, _ = make_numbers(tmp_path, "lines", [6, 6, 6])
    for num_saved, num_workers in ((2, 3), (2, 1), (1, 2)):
        workers = Workers(lambda: steps(rows), num_saved)
        workers.take(1)
        saved = workers.save()
        with pytest.raises(rx.errors.NotResumableError, match=rf"^{said}.* AutoShardPolicy\.DATA"):
            Workers(lambda: steps(rows), num_workers, saved)
        Workers(lambda: steps(rows), num_saved, saved).take()
    shared = Workers(lambda: steps(rows), 2, policy=DATA)
    shared.take(1)
    Workers(lambda: steps(rows), 3, shared.save(), policy=DATA).take()


def test_position_of_one_worker_alone(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [6, 6, 6])
    workers = Workers(lambda: rows.batch(2), 2)
    workers.take(1)
    states = json.loads(workers.save())
    for num_workers, state in ((1, states[0]), (3, states[1]), (2, states[1])):
        with pytest.raises(rx.errors.NotResumableError, match="has the positions of all"):
            Workers(lambda: rows.batch(2), num_workers, json.dumps([state]))


def test_other_datasets_say_that_the_number_is_fixed():
    arrays = rx.data.from_arrays(np.arange(6)).batch(2)
    states = json.dumps([{"position": 0}, {"position": 1}])
    with pytest.raises(rx.errors.NotResumableError, match="2 workers have saved a position each"):
        Workers(lambda: arrays, 3, states, policy=AutoShardPolicy("OFF"))


def test_positions_of_other_files_are_rejected(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [6, 6, 6])
    workers = Workers(lambda: rows.batch(2), 2, policy=FILE)
    workers.take(1)
    saved = workers.save()
    (tmp_path / "part-001").write_text("1\n")
    again = rx.data.from_text_lines(str(tmp_path / "part-*")).map(lambda line: {"n": np.int64(line)})
    with pytest.raises(rx.errors.NotResumableError, match="of another dataset"):
        Workers(lambda: again.batch(2), 3, saved)
