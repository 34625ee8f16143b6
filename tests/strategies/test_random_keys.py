"""Typed random keys pass through every function of a strategy that takes or gives values, as arrays do.

A function without a row in the table is listed in ``TAKES_NO_VALUES``, so that a new one gets its row.
"""

import copy
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.scope.context import ReplicaContext

KEY = jax.random.key(3)
OPTIONS = {"donate_args": (0,)}, {"eager": True}, {"check_finite": True}, {"check_same": True}

STRATEGIES = {
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "logical": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(4)], devices_per_replica=2),
    "sharded": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}

TAKES_NO_VALUES = {
    "Strategy": {
        *(
            "bindings",
            "cluster_resolver",
            "colocate_vars_with",
            "configure",
            "distribute_datasets_from_function",
        ),
        *(
            "experimental_distribute_dataset",
            "experimental_distribute_datasets_from_function",
            "experimental_run",
        ),
        *(
            "experimental_make_numpy_dataset",
            "extended",
            "is_chief",
            "is_default",
            "joins_trace",
        ),
        *(
            "make_dataset_iterator",
            "make_experimental_numpy_dataset",
            "make_input_fn_iterator",
            "num_logical_devices",
        ),
        *(
            "num_replicas_in_sync",
            "partitions_by_spmd",
            "parts",
            "view_on",
            "reduce_in_replica",
            "runner",
            "scope",
        ),
        *("shards_on", "steps_runner", "topology", "update_config_proto", "user_ops", "variable_placement"),
    },
    "StrategyExtended": {
        *(
            "colocate_vars_with",
            "experimental_between_graph",
            "experimental_make_numpy_dataset",
            "non_slot_devices",
        ),
        *(
            "experimental_require_static_shapes",
            "experimental_run_steps_on_iterator",
            "experimental_should_init",
        ),
        *(
            "parameter_devices",
            "should_checkpoint",
            "should_save_summary",
            "update_non_slot",
            "value_container",
        ),
        *("variable_created_in_scope", "worker_devices"),
    },
    "ReplicaContext": {
        "communicator",
        "devices",
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
        "strategy",
    },
}


def words(keys):
    return np.asarray(jax.random.key_data(keys))


def folded(number):
    return jax.random.fold_in(KEY, number)


def per_replica(strategy):
    """One key for each replica."""
    return strategy.experimental_distribute_values_from_function(lambda c: folded(c.replica_id_in_sync_group))


def of_sizes(strategy):
    """Replica r has r + 1 keys."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: jax.random.split(KEY, c.replica_id_in_sync_group + 1)
    )


def replica_ids(strategy):
    return range(strategy.num_replicas_in_sync)


def all_sizes(strategy):
    return [key for r in replica_ids(strategy) for key in jax.random.split(KEY, r + 1)]


def split(key):
    return jax.random.split(key)[0]


def in_replica(fn, value=per_replica):
    """The components of what a replica function returns for its key."""
    return lambda s: s.experimental_local_results(s.run(fn, args=(value(s),)))


def taken_steps(strategy):
    data = iter(strategy.experimental_distribute_dataset(rx.data.from_arrays(np.zeros(8)).batch(2)))
    state, _ = strategy.run_steps(lambda key, x: (split(key), key), data, 2, state=KEY)
    return state


def saved(value):
    def restored(strategy):
        made = value(strategy)
        with tempfile.TemporaryDirectory() as folder:
            path = rx.Checkpoint(tree={"key": made}).save(f"{folder}/c")
            tree = {"key": jax.tree.map(lambda key: key, made)}
            rx.Checkpoint(tree=tree).restore(path)
            return strategy.experimental_local_results(tree["key"])

    return restored


def assigned(strategy):
    with strategy.scope():
        variable = rx.Variable(KEY)
    strategy.run(lambda: variable.assign(split(variable.value)))
    assert "key<fry>" in repr(variable)
    return variable.value


def updated(strategy):
    with strategy.scope():
        variable = rx.Variable(KEY)
    strategy.extended.update(variable, lambda v, key: v.assign(key), args=(split(KEY),))
    return strategy.extended.read_var(variable)


def split_over_devices(key):
    strategy = rx.get_strategy()
    return strategy.experimental_split_to_logical_devices(
        jnp.stack([key, key]), [strategy.num_logical_devices]
    )[0]


def each(fn):
    """What a function of a replica's key gives on each replica."""
    return lambda s: [fn(folded(r)) for r in replica_ids(s)]


def same(value):
    return lambda s: [value] * s.num_replicas_in_sync


def one(value):
    return lambda s: value


def unchanged(value):
    return value


# By function: what it gives, and the keys that are expected.
TABLE = {
    "Strategy.replicate": (lambda s: s.unreplicate(s.replicate({"a": KEY}))["a"], one(KEY)),
    "Strategy.replicate of Mirrored": (lambda s: s.unreplicate(s.replicate(s.replicate(KEY))), one(KEY)),
    "Strategy.mirrored": (lambda s: s.unreplicate(s.mirrored(KEY)), one(KEY)),
    "Strategy.unreplicate": (lambda s: s.unreplicate(s.run(split, args=(KEY,))), one(split(KEY))),
    "Strategy.experimental_distribute_values_from_function": (
        lambda s: s.experimental_local_results(per_replica(s)),
        each(unchanged),
    ),
    "Strategy.experimental_local_results": (
        lambda s: s.experimental_local_results(s.replicate(KEY)),
        same(KEY),
    ),
    "Strategy.unwrap": (lambda s: s.unwrap(per_replica(s)), each(unchanged)),
    "Strategy.group": (lambda s: (s.group(per_replica(s)), KEY)[1], one(KEY)),
    "Strategy.gather": (lambda s: s.gather(of_sizes(s), axis=0), all_sizes),
    "Strategy.reduce": (lambda s: s.reduce("MEAN", s.replicate(KEY), axis=None), one(KEY)),
    "Strategy.run": (in_replica(split), each(split)),
    "Strategy.run of different sizes": (
        lambda s: s.gather(s.run(lambda keys: jax.vmap(split)(keys), args=(of_sizes(s),)), axis=0),
        lambda s: [split(key) for key in all_sizes(s)],
    ),
    "Strategy.run of kwargs": (lambda s: s.unreplicate(s.run(split, kwargs={"key": KEY})), one(split(KEY))),
    "Strategy.run of a closure": (lambda s: s.unreplicate(s.run(lambda: split(KEY))), one(split(KEY))),
    **{
        f"Strategy.run with {options}": (
            lambda s, o=options: s.unreplicate(
                s.run(split, args=(s.replicate(KEY),), options=rx.RunOptions(**o))
            ),
            one(split(KEY)),
        )
        for options in OPTIONS
    },
    "Strategy.run_steps": (lambda s: s.unreplicate(taken_steps(s)), one(split(split(KEY)))),
    "Strategy.lower": (lambda s: (s.lower(split, (KEY,)).as_text(), KEY)[1], one(KEY)),
    "Strategy.experimental_replicate_to_logical_devices": (
        in_replica(lambda key: rx.get_strategy().experimental_replicate_to_logical_devices(key)),
        each(unchanged),
    ),
    "Strategy.experimental_assign_to_logical_device": (
        in_replica(lambda key: rx.get_strategy().experimental_assign_to_logical_device(key, 0)),
        each(unchanged),
    ),
    "Strategy.experimental_split_to_logical_devices": (
        in_replica(lambda key: split_over_devices(key)),
        each(unchanged),
    ),
    "StrategyExtended.broadcast_to": (
        lambda s: s.unreplicate(s.extended.broadcast_to(KEY, s.extended.worker_devices)),
        one(KEY),
    ),
    "StrategyExtended.call_for_each_replica": (
        lambda s: s.unreplicate(s.extended.call_for_each_replica(split, args=(KEY,))),
        one(split(KEY)),
    ),
    "StrategyExtended.update": (updated, one(split(KEY))),
    "StrategyExtended.read_var": (updated, one(split(KEY))),
    "ReplicaContext.all_gather": (
        in_replica(lambda keys: rx.get_replica_context().all_gather(keys, axis=0)[-1], of_sizes),
        lambda s: [all_sizes(s)[-1]] * s.num_replicas_in_sync,
    ),
    "ReplicaContext.merge_call": (
        in_replica(lambda key: rx.get_replica_context().merge_call(lambda s, k: k, args=(key,))),
        each(unchanged),
    ),
    "rx.function": (lambda s: rx.function(split)(KEY), one(split(KEY))),
    "rx.function around run": (
        lambda s: s.experimental_local_results(
            rx.function(lambda key: s.run(split, args=(key,)))(per_replica(s))
        ),
        each(split),
    ),
    "rx.cond": (in_replica(lambda key: rx.cond(jnp.bool_(True), split, unchanged, key)), each(split)),
    "rx.assert_same": (in_replica(rx.assert_same), each(unchanged)),
    "rx.Precision": (in_replica(rx.Precision("bfloat16")(split)), each(split)),
    "rx.Variable": (assigned, one(split(KEY))),
    "rx.Checkpoint of Mirrored": (saved(lambda s: s.replicate(KEY)), same(KEY)),
    "rx.Checkpoint of PerReplica": (saved(per_replica), each(unchanged)),
    "rx.Checkpoint of a result": (saved(lambda s: s.run(split, args=(KEY,))), same(split(KEY))),
    "copy.copy": (lambda s: s.experimental_local_results(copy.copy(per_replica(s))), each(unchanged)),
    "jax.block_until_ready": (
        lambda s: s.experimental_local_results(jax.block_until_ready(per_replica(s))),
        each(unchanged),
    ),
}

UNSUPPORTED = {  # for values of any kind
    ("central", "Strategy.lower"),
    ("sharded", "Strategy.run with {'check_finite': True}"),
}


OF_PARTS = {"Strategy.plan"}  # tests/plan/test_random_keys.py


@pytest.mark.parametrize("name", [
    "mirrored", *(pytest.param(n, marks=pytest.mark.rest) for n in ("one_device", "logical", "sharded", "central"))
])  # fmt: skip
def test_keys_pass_through_every_function(name):
    strategy, failed = STRATEGIES[name](), {}
    for function, (given, expected) in TABLE.items():
        if (name, function) in UNSUPPORTED:
            continue
        try:
            got, keys = jax.tree.leaves(given(strategy)), expected(strategy)
            keys = keys if isinstance(keys, list) else [keys]
            got = [key for array in got for key in (array if array.ndim else [array])]
            np.testing.assert_array_equal(list(map(words, got)), list(map(words, keys)))
        except Exception as error:
            failed[function] = error
    assert not failed


def test_each_function_that_takes_values_has_a_row():
    owners = {
        "Strategy": rx.Strategy,
        "StrategyExtended": type(rx.get_strategy().extended),
        "ReplicaContext": ReplicaContext,
    }
    rows = {row.split(" ")[0] for row in TABLE} | {f"{owner}.{name}" for owner, name in REFUSED} | OF_PARTS
    for owner, cls in owners.items():
        public = {name for name in dir(cls) if not name.startswith("_")}
        assert {name for name in public if f"{owner}.{name}" not in rows} == TAKES_NO_VALUES[owner]


REFUSED = {
    ("Strategy", "reduce"): lambda s: s.reduce("SUM", per_replica(s), axis=None),
    ("StrategyExtended", "reduce_to"): lambda s: s.extended.reduce_to("SUM", per_replica(s), "cpu:0"),
    ("StrategyExtended", "batch_reduce_to"): lambda s: s.extended.batch_reduce_to(
        "SUM", [(per_replica(s), "cpu:0")]
    ),
    ("ReplicaContext", "all_reduce"): in_replica(lambda key: rx.get_replica_context().all_reduce("SUM", key)),
}


@pytest.mark.parametrize("function", REFUSED, ids=".".join)
def test_sums_of_keys_are_a_typed_error(function):
    with pytest.raises(rx.errors.ReductionError, match="key<fry>"):
        REFUSED[function](STRATEGIES["mirrored"]())


def test_accumulated_sums_of_keys_are_a_typed_error_and_a_key_may_be_an_argument():
    strategy = STRATEGIES["mirrored"]()
    of_key = rx.experimental.accumulate(2)(lambda x, key: (jax.random.uniform(key) * x.sum(), len(x)))
    result = strategy.run(of_key, args=(np.ones(4, np.float32), KEY))
    total = sum(float(v) for v in strategy.experimental_local_results(result))
    np.testing.assert_allclose(total, float(jax.random.uniform(KEY)), rtol=1e-6)
    with pytest.raises(rx.errors.StructureError, match="key<fry>"):
        strategy.run(rx.experimental.accumulate(2)(lambda x: (KEY, len(x))), args=(np.ones(4, np.float32),))


def test_values_of_keys_are_printed_with_their_words():
    strategy = STRATEGIES["mirrored"]()
    first, second = (str(int(words(folded(r))[0])) for r in range(2))
    for value in (per_replica(strategy), of_sizes(strategy)):
        assert "key<fry>" in repr(value)
        assert "key&lt;fry&gt;" in value._repr_html_()
    text = f"{per_replica(strategy)}"
    assert first in text
    assert second in text
    assert "[0 3]" in repr(strategy.replicate(KEY))
    with pytest.raises(rx.errors.PerReplicaUseError):
        strategy.unreplicate(per_replica(strategy))
