"""The saved value of a variable, and its restoration by assignment, as in a checkpoint.

TensorFlow's numbers (its ``values_util.py``, cases 46 and 47): ON_READ variables are saved aggregated; restoring
one that is summed divides by R; mirrored variables move between any numbers of replicas.
"""

import numpy as np
import pytest

import replicax as rx


def mirrored(num_replicas):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


@pytest.mark.parametrize(
    ("aggregation", "saved", "restored"),
    [("SUM", 7.0, [1.0, 1.0]), ("MEAN", 3.5, [2.0, 2.0]), ("ONLY_FIRST_REPLICA", 3.0, [2.0, 2.0])],
)
def test_on_read_is_saved_aggregated_and_restored_to_components(aggregation, saved, restored):
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(0.0, synchronization="ON_READ", aggregation=aggregation)
    components = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32(3 + ctx.replica_id_in_sync_group)
    )
    strategy.run(v.assign, args=(components,))
    plain = rx.Variable(v.numpy())
    assert float(plain.value) == saved
    v.assign(2.0)
    assert [float(c) for c in v.values] == restored


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_mirrored_moves_between_numbers_of_replicas(sizes):
    first, second = map(mirrored, sizes)
    with first.scope():
        source = rx.Variable([1.0, 2.0])
    first.run(lambda: source.assign_add([1.0, 1.0]))
    with second.scope():
        target = rx.Variable([0.0, 0.0])
    target.assign(source.numpy())
    assert [c.tolist() for c in target.values] == [[2.0, 3.0]] * sizes[1]
    second.run(lambda: target.assign_add([1.0, 1.0]))
    assert target.numpy().tolist() == [3.0, 4.0]
    assert source.numpy().tolist() == [2.0, 3.0]
