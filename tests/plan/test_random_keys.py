"""Plans take random keys, which are values as others are."""

import jax
import pytest

import replicax as rx

STRATEGIES = {
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "logical": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(4)], devices_per_replica=2),
    "sharded": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
}


@pytest.mark.parametrize("name", [
    "mirrored", *(pytest.param(n, marks=pytest.mark.rest) for n in ("one_device", "logical", "sharded"))
])  # fmt: skip
def test_keys_are_arguments_of_plans(name):
    strategy = STRATEGIES[name]()
    keys = strategy.experimental_distribute_values_from_function(
        lambda context: jax.random.fold_in(jax.random.key(3), context.replica_id_in_sync_group)
    )
    plan = strategy.plan(lambda key: jax.random.split(key)[0], (keys,))
    assert [array.name for array in plan.arrays] == ["args[0]"]
