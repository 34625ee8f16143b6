"""Every kind of loop and of gradient over real processes: the losses and the weights are those of one process."""

import collections
import json

import numpy as np
import pytest

from loops import loops, over_files, own_states

pytestmark = [pytest.mark.timeout(300), pytest.mark.rest]
SIZES = [(2, 1), *(pytest.param(size, marks=pytest.mark.long) for size in [(2, 2), (3, 1)])]
WAYS = (
    "single_runs",
    "run_steps",
    "function",
    "merge_call",
    "value_and_grad",
    "optax",
    "nnx",
    "one_file",
    "one_file_run_steps",
)


def table(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, 3))
    return np.column_stack([features, features @ [1.0, -2.0, 0.5] + np.arange(num_rows) / num_rows])


# 21 rows in batches of 8: the last has 5. 17: it has one, and other replicas none.
@pytest.fixture(
    scope="module",
    params=[21, pytest.param(16, marks=pytest.mark.long), pytest.param(17, marks=pytest.mark.long)],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    np.savetxt(folder / "all.txt", table(request.param))
    return str(folder)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_equals_one_process(size, way, folder, reports_of):
    (one,) = reports_of(loops, "8", folder, workers=1)
    expected = one[way]
    assert expected["losses"][-1] != expected["losses"][0]
    for worker in reports_of(loops, "8", folder, workers=size[0], devices=size[1]):
        np.testing.assert_allclose(worker[way]["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(worker[way]["weights"], expected["weights"], rtol=1e-5, atol=1e-6)


def test_all_loops_train_alike(folder, reports_of):
    """Loops with the same update rule are equal, so no loop can leave out a step, in one process either."""
    (one,) = reports_of(loops, "8", folder, workers=1)
    for way in set(WAYS) - {"optax", "nnx"}:
        np.testing.assert_allclose(one[way]["losses"], one["single_runs"]["losses"], rtol=1e-5, err_msg=way)


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_distributed_files_equal_one_process_with_the_same_batches(size, reports_of, tmp_path):
    parts = [table(rows, seed) for seed, rows in enumerate((9, 4, 6))]
    for number, part in enumerate(parts):
        np.savetxt(tmp_path / f"part{number}.txt", part)
    workers = reports_of(over_files, "8", str(tmp_path), "", workers=size[0], devices=size[1])
    seen = workers[0]["seen"]
    times = collections.Counter(tuple(row) for batch in seen for row in batch)
    assert times == dict.fromkeys([tuple(row) for part in parts for row in part.astype("f").tolist()], 2)
    (one,) = reports_of(over_files, "8", "", json.dumps(seen), workers=1)
    for worker in workers:
        assert worker["seen"] == one["seen"]
        assert "FILE" in worker["shown"]
        np.testing.assert_allclose(worker["losses"], one["losses"], rtol=1e-5)
        np.testing.assert_allclose(worker["weights"], one["weights"], rtol=1e-5, atol=1e-6)


def test_all_continue_with_the_first_workers_state_and_warn(reports_of):
    for worker in reports_of(own_states):
        assert worker["states"] == [[18.0, 1.0], [18.0, 1.0], [26.0, 1.0]]
        assert [
            text.count("(state['w']). All continue with those of worker 0") for text in worker["said"]
        ] == [
            1,
            1,
        ]
