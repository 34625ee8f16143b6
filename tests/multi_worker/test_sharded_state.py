"""State sharded over the replicas of several processes: the numbers of one device, and what each process can read and
save."""

import jax
import pytest

from checks import assert_close
from programs import divided, divided_saves, looking_up_rows, restored_in_two_dimensions

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("devices", "state", "shards", "num_logical"),
    [
        pytest.param(1, "all", 2, 1, marks=pytest.mark.long),
        pytest.param(2, "all", 2, 1, marks=pytest.mark.long),
        pytest.param(2, "all", 4, 1, marks=pytest.mark.long),
        pytest.param(2, "optimizer", 4, 1, marks=pytest.mark.long),
        (4, "all", 4, 2),  # 4 replicas of 2 devices
        pytest.param(4, "all", 2, 2, marks=pytest.mark.long),
        pytest.param(4, "optimizer", 4, 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.rest
def test_training_equals_one_device_and_shards_memory(reports_of, devices, state, shards, num_logical):
    (expected,) = reports_of(divided, "all", "0", workers=1)
    for got in reports_of(divided, state, str(shards), str(num_logical), workers=2, devices=devices):
        assert_close(jax.tree.leaves(got["initial"]), jax.tree.leaves(expected["initial"]), 0)
        for name in ("history", "fitted", "predicted", "losses", "trained", "assigned", "after"):
            assert_close(jax.tree.leaves(got[name]), jax.tree.leaves(expected[name]), 1e-5, 1e-6, name)
        share = devices / shards / num_logical  # of a worker: a bias of one number stays whole
        of_bindings = [share] * 6 + [devices] * 2
        assert sorted(got["of_optimizer"]) == sorted(of_bindings)
        of_model = [share] * 3 if state == "all" else [devices / num_logical] * 3
        assert got["held"] == got["held_after"] == [*of_model, devices]


@pytest.mark.rest
def test_checkpoint_of_variables_in_two_dimensions_is_restored(reports_of, tmp_path):
    for got in reports_of(restored_in_two_dimensions, str(tmp_path / "a"), workers=2, devices=4):
        assert got["restored"] == got["trained"]
        assert got["shards"] == [[2, 2]]


@pytest.mark.rest
def test_a_chief_saves_alone_at_the_end_of_an_epoch_and_all_save_together(reports_of, tmp_path):
    chief, other = reports_of(divided_saves, str(tmp_path), workers=2)
    assert chief["initial"] == other["initial"]
    assert chief["seen"] == other["seen"]
    assert chief["weights"] == other["weights"] == chief["loaded"]
    assert chief["seen"][-1] == chief["weights"][0]
    for report in (chief, other):  # none of them waits for ever
        assert report["held"] == [1 / 2, 1 / 2, 1 / 2, 1], "loaded weights are cut before a program runs"
        assert report["assigned"] == [[1.0] * 8] * 6, "where the values differ, all take the first worker's"
        kind, text = report["alone"]
        assert kind in ("PeerFailureError", "ProgramMismatchError"), text


@pytest.mark.rest
def test_workers_exchange_rows_of_a_table(reports_of):
    """Batches of 13, 13 and 3 rows on 4 replicas, one of which has none of the last."""
    (expected,) = reports_of(looking_up_rows, workers=1)
    for got in reports_of(looking_up_rows, workers=2, devices=2):
        assert got["held"] == [2048, 2048]
        assert_close([got["losses"], got["rows"]], [expected["losses"], expected["rows"]], 1e-5, 1e-6)
