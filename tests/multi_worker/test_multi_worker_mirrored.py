"""``MultiWorkerMirroredStrategy`` in real processes: the view of each worker, and that all together equal one device."""

import itertools
import json

import numpy as np
import pytest

from checks import in_a_process_of_its_own
from programs import (
    buffers,
    creating_late,
    datasets,
    fitting,
    fitting_of_datasets,
    fitting_of_similarities,
    fitting_with_mistakes,
    promises,
    saving_between_batches,
    training,
)

pytestmark = pytest.mark.timeout(180)
CLUSTERS = [
    (2, 1),
    pytest.param((2, 2), marks=pytest.mark.rest),
    pytest.param((3, 1), marks=pytest.mark.long),
]
TRAINED_ON = [
    (2, 1),
    *(pytest.param(size, marks=pytest.mark.long) for size in [(2, 2), (3, 1), (3, 2)]),
]


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda size: f"{size[0]}_workers_of_{size[1]}")
def size(request):
    return request.param


@pytest.fixture
def workers(size, reports_of):
    return reports_of(promises, workers=size[0], devices=size[1])


@pytest.mark.rest
def test_devices_and_replicas(size, workers):
    num_workers, num_devices = size
    for number, worker in enumerate(workers):
        assert worker["num_replicas"] == num_workers * num_devices
        assert worker["num_devices"] == num_devices
        assert worker["processes"] == [number]
        assert worker["ids"] == list(range(number * num_devices, (number + 1) * num_devices))
        assert worker["checkpoint"] == worker["summary"] == (number == 0)


def test_chiefs_initial_value_is_used_by_all(workers):
    assert [worker["initial"] for worker in workers] == [5.0] * len(workers)


@pytest.mark.rest
def test_a_task_of_type_chief_comes_first(reports_of):
    chief, worker = reports_of(promises, workers=1, chief=True)
    assert (chief["task"], worker["task"]) == (["chief", 0], ["worker", 0])
    assert (chief["ids"], worker["ids"]) == ([0], [1])
    assert (chief["checkpoint"], worker["checkpoint"]) == (True, False)
    assert chief["initial"] == worker["initial"] == 5.0  # the worker's own would have been 6
    assert chief["everyone"] == worker["everyone"] == 3.0


def test_values_of_replicas(size, workers):
    num_replicas = size[0] * size[1]
    numbers = [r + 1.0 for r in range(num_replicas)]
    total = sum(numbers)
    assert list(itertools.chain(*(worker["tens"] for worker in workers))) == [10 * n for n in numbers]
    rows = [float(i) for r in range(num_replicas) for i in range(r + 1)]
    for worker in workers:
        assert worker["everyone"] == total
        assert worker["merged"] == pytest.approx(total / num_replicas)
        assert worker["gathered"] == numbers
        assert worker["total"] == worker["on_read"] == total
        assert worker["on_read_mean"] == pytest.approx(total / num_replicas)
        assert worker["on_read_first"] == numbers[0]
        assert worker["on_read_reduced"] == pytest.approx([total, total / num_replicas])
        first_of_last_run = 10 * numbers[0]
        assert worker["assigned_on_read"] == pytest.approx(8.0)
        assert worker["added_on_read"] == 2.0 + first_of_last_run
        assert worker["own"] == [2.0 + first_of_last_run] * size[1]
        assert worker["reduced"] == 10 * total
        assert worker["mean"] == pytest.approx(10 * total / num_replicas)
        assert worker["rows"] == rows
        assert worker["sum_of_rows"] == sum(rows)
        assert worker["mean_of_rows"] == pytest.approx(np.mean(rows))
        assert worker["function"] == 100 * total
        assert worker["total_after"] == total + total + 10 * total
        assert (worker["assigned"], worker["plain"]) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("bytes_per_pack", "num_buffers"),
    [
        (0, 3 + 1),  # the two of at least 2 MiB, the other floats, the ints
        pytest.param(1 << 20, 4 + 1, marks=pytest.mark.long),
        pytest.param(1 << 30, 1 + 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.rest
def test_arrays_are_summed_in_common_buffers(reports_of, bytes_per_pack, num_buffers):
    for worker in reports_of(buffers, str(bytes_per_pack)):
        assert worker["are_right"]
        assert worker["counts"] == [1, [14, 14, 14]]
        assert worker["num_buffers"] == num_buffers


def test_repr_shows_the_replicas_of_this_worker(size, workers):
    last = size[0] * size[1] - 1
    assert f"  {last}: array({10 * (last + 1)}., dtype=float32)" in workers[-1]["shown"]
    assert "  0: " not in workers[-1]["shown"]


def test_replica_functions_do_not_run_eagerly_in_a_cluster(size, workers):
    num_replicas = size[0] * size[1]
    for number, worker in enumerate(workers):
        assert f"worker {number} has only those of {size[1]}" in worker["eager"]
        assert f"rx.config.set_local_devices({num_replicas})" in worker["eager"]
        assert worker["total_after_eager"] == 3.0


@pytest.mark.parametrize(
    "config", ["", pytest.param("{}", marks=pytest.mark.long), '{"cluster": {}, "task": {}}']
)
@pytest.mark.rest
def test_an_empty_configuration_is_one_worker(config):
    """A single worker can do everything that one process can: it joins no other, and JAX may have started."""
    shown = in_a_process_of_its_own(
        """
        import jax.numpy as jnp
        import numpy as np
        jnp.zeros(1)
        import replicax as rx
        strategy = rx.MultiWorkerMirroredStrategy()
        rows = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(5.0)).batch(5))
        def step(x):
            return rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        for options in (None, rx.RunOptions(eager=True)):
            (batch,) = rows
            total = strategy.run(step, args=(batch,), options=options)
            print(strategy.num_replicas_in_sync, float(strategy.experimental_local_results(total)[0]))
        """,
        TF_CONFIG=config,
        JAX_NUM_CPU_DEVICES="2",
    )
    assert shown.splitlines() == ["2 10.0", "2 10.0"]


# --- datasets ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fed(reports_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number in range(3):  # lines of the lengths 10, 11, 12; 20, 21, 22; 30, 31, 32
        lines = ["x" * (10 * (number + 1) + i) for i in range(3)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return reports_of(datasets, str(folder))


def steps(fed, name):
    """The steps of each worker; each has one replica."""
    return [[step[0] for step in worker[name]] for worker in fed]


@pytest.mark.parametrize("name", ["data", "generator"])
def test_data(fed, name):
    """TensorFlow's case, input_lib_test::testMWMSWithDataSharding."""
    assert steps(fed, name) == [[[0, 1], [3, 4], [6]], [[2], [5], [7]]]


def test_off(fed):
    """Each worker reads everything, and starts with its own slices. (TensorFlow cuts the last batch into 2 and 0
    rows.)"""
    assert steps(fed, "off") == [[[0, 1], [2], [3], [4]], [[0], [1, 2], [3], [4]]]


def test_sources_of_different_lengths_end_together(fed):
    """TensorFlow's case, input_lib_test::testDifferentDatasetsMultiWorker."""
    assert steps(fed, "uneven") == [
        [[0, 1], [2, 3], [4, 5], [6, 7], []],
        [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
    ]


def test_a_partial_batch_at_the_end(fed):
    """TensorFlow's case, testSimpleInputFromFnLastPartialBatch."""
    assert steps(fed, "partial") == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13]]]


def test_a_worker_without_data_steps_with_the_others(fed):
    assert steps(fed, "nothing") == [[[], []], [[0, 1], [2, 3]]]


def test_dataset_can_be_iterated_again(fed):
    assert [worker["again"] for worker in fed] == [[[[[0, 1]]]] * 2, [[[[2, 3]]]] * 2]


def test_files(fed):
    """Worker 0 has the files 0 and 2, worker 1 the file 1; every line is seen once, and both end together."""
    seen = [list(itertools.chain(*worker)) for worker in steps(fed, "files")]
    assert seen == [[10, 11, 12, 30, 31, 32], [20, 21, 22]]
    assert len({len(worker) for worker in steps(fed, "files")}) == 1


def test_files_one_row_at_a_time(fed):
    """A case of tf_keras (distribute_strategy_test, the policy FILE): a worker without rows left gets empty batches."""
    assert steps(fed, "files_one_by_one") == [
        [[10], [11], [12], [30], [31], [32]],
        [[20], [21], [22], [], [], []],
    ]


def test_fewer_files_than_workers(fed):
    seen = list(itertools.chain(*itertools.chain(*steps(fed, "few_files"))))
    assert sorted(seen) == [10, 11, 12]
    assert "1 file is not enough for 2 workers" in fed[0]["policy"]
    for worker in fed:
        (warning,) = worker["warnings"]  # of three such datasets
        assert warning.startswith("Input: 1 text file, AUTO: 1 file is not enough for 2 workers")
        assert "Write the data to more files" in warning
    assert all("at least one file for each of the 2 workers" in worker["not_enough"] for worker in fed)


def test_datasets_that_differ_are_an_error(fed):
    for worker in fed:
        assert "worker 0 2, worker 1 3" in worker["lengths"]
        assert "do not match" in worker["shapes"]


# --- training ------------------------------------------------------------------------------------------


def assert_trained_alike(got, expected):
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-5)
    assert got["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)
    for weight, wanted in zip(got["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


# 37 rows in batches of 9: no batch divides by the replicas, and the last, of 1 row, leaves replicas without a row.
# Keras's loops run in the same processes, because starting these takes most of the time.
ROWS = "37,9"
LEARNING = [(training, ROWS), (fitting, "3")]


@pytest.mark.parametrize("size", TRAINED_ON, ids=str)
def test_training_equals_one_device(size, reports_of):
    (expected,) = reports_of(LEARNING, workers=1)
    for got in reports_of(LEARNING, workers=size[0], devices=size[1]):
        assert_trained_alike(got[ROWS], expected[ROWS])


@pytest.mark.long
@pytest.mark.parametrize("size", TRAINED_ON, ids=str)
def test_training_on_batches_that_divide_equals_one_device(size, reports_of):
    (expected,) = reports_of(training, "32,8", workers=1)
    for got in reports_of(training, "32,8", workers=size[0], devices=size[1]):
        assert_trained_alike(got["32,8"], expected["32,8"])


@pytest.mark.parametrize("size", TRAINED_ON, ids=str)
def test_fit_equals_one_device(size, reports_of):
    (expected,) = reports_of(LEARNING, workers=1)
    for got in reports_of(LEARNING, workers=size[0], devices=size[1]):
        assert_fitted_alike(got["3"], expected["3"])


@pytest.mark.rest
def test_variables_created_in_the_first_step_equal_earlier_ones(reports_of):
    first, second = reports_of(creating_late)
    for worker in (first, second):
        assert worker["refused"]
        assert worker["late"] == first["before"]
        assert worker["late"]["count"] == 2
        in_function = worker["in_function"]
        np.testing.assert_allclose(in_function["losses"], first["before"]["losses"], rtol=1e-5)
        for weight, wanted in zip(in_function["weights"], first["before"]["weights"], strict=True):
            np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=1e-6)


def assert_fitted_alike(got, expected):
    assert got["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(got["history"][name], values, rtol=1e-5)
    np.testing.assert_allclose(got["evaluated"], expected["evaluated"], rtol=1e-5)
    np.testing.assert_allclose(got["predicted"], expected["predicted"], rtol=1e-4, atol=1e-6)
    for weight, wanted in zip(got["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=1e-6)


KINDS = [
    ("function", "ahead"),
    *(
        pytest.param(kind, style, marks=pytest.mark.long)
        for kind, style in [
            ("function", "jax"),
            ("shared", "jax"),
            ("files", "jax"),
            ("files", "tensorflow"),
            ("shared", "several"),
            ("files", "several"),
            ("function", "several"),
            ("shared", "tensorflow"),
            ("function", "tensorflow"),
        ]
    ),
]


@pytest.mark.parametrize(("kind", "style"), KINDS)
@pytest.mark.rest
def test_fit_of_datasets_equals_one_device(kind, style, reports_of, tmp_path):
    """One device gets in each step the rows of all workers: no row is lost, or counted twice."""
    rng = np.random.default_rng(0)
    for number in range(3):
        rows = rng.normal(size=((4, 7, 6)[number], 4)).round(3)
        lines = [" ".join(map(str, [*row, int(row[0] > 0)])) for row in rows]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines) + "\n")
    given = str(tmp_path) if kind in ("shared", "files") else ""
    workers = reports_of(fitting_of_datasets, kind, style, given)
    steps = [
        [[row for part in parts for row in part] for parts in zip(*step)]
        for step in zip(*(worker["steps"] for worker in workers))
    ]
    assert sum(len(y) for _, y in steps) == (17 if given else 2 * (2 + 4) + 5 * 3)
    (expected,) = reports_of(fitting_of_datasets, "steps", style, json.dumps(steps), workers=1)
    for got in workers:
        assert_fitted_alike(got, expected)


@pytest.mark.rest
def test_unsplittable_step_stays_in_the_global_view_and_the_log_names_the_operation(reports_of):
    (expected,) = reports_of(fitting_of_similarities, workers=1)
    assert expected["said"] == []
    for worker in reports_of(fitting_of_similarities):
        np.testing.assert_allclose(worker["losses"], expected["losses"], rtol=1e-5)
        of_similarities, of_similarities_at_the_end, of_squares, _ = worker["said"]
        assert of_similarities == of_similarities_at_the_end  # 6 rows, another program
        assert of_similarities.startswith(
            "WARNING: Sequential.train_step: the processes sum each array separately"
        )
        assert "dot_general mixes rows of the batch" in of_similarities
        assert "in similarities" in of_similarities
        assert (
            of_squares
            == "INFO: Sequential.train_step: the processes sum all arrays of a step together, in 1 round(s)."
        )


@pytest.mark.rest
def test_mistakes_around_fit_are_named_on_all_workers(reports_of):
    for worker in reports_of(fitting_with_mistakes):
        here = "given different batches, here number 1: worker 0 float32[8, 1], float32[8, 1] digest"
        assert here in worker["shuffled"]
        assert "seed" in worker["shuffled"]
        assert "`epochs`: worker 0 1, worker 1 2" in worker["epochs"]
        assert "worker 0 the end after 3, worker 1 float32[8, 1]" in worker["shorter"]
        assert (
            "set different variables since the last program:\n  worker 0: sequential/dense/kernel, sequential/dense/bias"
            in worker["loaded"]
        )
        assert worker["assigned"].startswith("ProgramMismatchError")
        assert "values that were set" in worker["assigned"]


@pytest.mark.rest
def test_callbacks_of_keras_save_between_batches_in_the_chief(reports_of, tmp_path):
    first, second = reports_of(saving_between_batches, str(tmp_path), workers=2)
    assert first == second
    saved = {path.name for path in tmp_path.glob("*.weights.h5")}
    assert saved == {"1-2.weights.h5", "1-4.weights.h5", "2-1.weights.h5", "2-3.weights.h5", "2-5.weights.h5"}
    assert (tmp_path / "backup" / "latest.weights.h5").exists()


@pytest.mark.rest
def test_without_a_seed_all_workers_train_one_model(reports_of):
    """Both run before a seed is set, which happens later in the same processes."""
    workers = reports_of(fitting, "none", "3")
    assert [worker["warnings"] for worker in workers] == [[], []]
    first, second = (worker["none"] for worker in workers)
    assert first["history"] == second["history"]
    for weight, other in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(weight, other)
