"""A strategy whose workers go on after a death: what it says of itself, and what it refuses."""

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from replicax import errors
from surviving_members import Members, strategy_of


@pytest.fixture
def strategy(monkeypatch):
    return strategy_of(Members(3), monkeypatch)


ROWS = np.zeros((6, 2), "float32"), np.zeros(6, "int32")


def dataset():
    return rx.data.from_arrays(ROWS).batch(3)


def with_policy(policy):
    return lambda strategy: strategy.experimental_distribute_dataset(dataset(), distribute_options=policy)


def fit(model, **options):
    model.compile("sgd", "mse", **options)
    model.fit(*ROWS, batch_size=6, verbose=0)


def in_scope(run):
    def use(strategy):
        with strategy.scope():
            run(strategy)

    return use


REFUSED = {
    "eager run": lambda strategy: strategy.run(lambda: 1, options=rx.RunOptions(eager=True)),
    "the policy FILE": with_policy("FILE"),
    "the policy OFF": with_policy("OFF"),
    "eager steps": in_scope(lambda _: fit(keras.Sequential([keras.layers.Dense(1)]), run_eagerly=True)),
}


@pytest.mark.parametrize("use", REFUSED)
def test_unrepeatable_use_names_the_other_way(use, strategy):
    with pytest.raises(errors.UnsupportedError, match="save_on_failure=True"):
        REFUSED[use](strategy)


@pytest.mark.parametrize(
    "options",
    [{"shard_state": "all"}, {"devices_per_replica": 2}, {"layout_map": {"kernel": (None, "logical")}}],
)
def test_divided_state_is_refused_when_the_strategy_is_made(options, monkeypatch):
    with pytest.raises(errors.UnsupportedError, match=f"{next(iter(options))}=.*save_on_failure=True"):
        strategy_of(Members(3), monkeypatch, **options)


def test_other_devices_are_refused_when_the_strategy_is_made():
    from replicax._src.strategies.surviving import check_devices

    with pytest.raises(errors.UnsupportedError, match=r"several devices \(cpu:0, cpu:1\)"):
        check_devices(jax.devices()[:2])


@pytest.mark.parametrize("least", [0, 1.5, True, "2"])
def test_fewest_workers_are_a_whole_number_of_at_least_one(least):
    with pytest.raises(errors.InvalidArgumentError, match="min_workers"):
        rx.FaultToleranceOptions(min_workers=least)


def test_fewest_workers_are_at_most_the_tasks(monkeypatch):
    with pytest.raises(errors.InvalidArgumentError, match="has 3 workers"):
        strategy_of(Members(3), monkeypatch, fault_tolerance=rx.FaultToleranceOptions(min_workers=4))


def test_option_is_true_or_false_or_options():
    with pytest.raises(errors.InvalidArgumentError, match="fault_tolerance must be"):
        rx.MultiWorkerMirroredStrategy(fault_tolerance="yes")


def test_single_worker_behaves_as_without_the_option(caplog, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with caplog.at_level("INFO", "replicax"):
        strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    assert "fault_tolerance has no effect in a cluster of one worker" in caplog.text
    assert strategy.topology.survivors is None
    assert strategy.num_replicas_in_sync == len(jax.devices())


def test_it_says_what_it_is(strategy):
    assert repr(strategy) == (
        "<MultiWorkerMirroredStrategy(fault_tolerance=True) on cpu:0, for replicas 0, 1, 2 of 3>"
    )
    assert strategy.num_replicas_in_sync == 3
    assert len(strategy.extended.worker_devices) == 1


def test_variables_start_with_the_values_of_the_chief(monkeypatch):
    class Others(Members):
        def broadcast(self, arrays):
            return [np.full_like(array, 7) for array in arrays]

    strategy = strategy_of(Others(3), monkeypatch)
    gather = strategy.topology.peers.gather
    monkeypatch.setattr(
        strategy.topology.peers,
        "gather",
        lambda topic, value, what, **_: type(gather(topic, value, what))(
            [value, "other"], [0, 1], ["a", "b"], 0
        ),
    )
    with strategy.scope():
        own, of_keras = rx.Variable(1.0), keras.Variable(np.ones(2, "float32"))
    assert own.numpy() == 7.0
    assert np.array(of_keras.value).tolist() == [7.0, 7.0]


def test_values_outside_of_functions_are_as_usual(strategy):
    with strategy.scope():
        variable = rx.Variable([1.0, 2.0])
    variable.assign_add([1.0, 1.0])
    assert variable.numpy().tolist() == [2.0, 3.0]
    assert [value.tolist() for value in variable.values] == [[2.0, 3.0]] * 3
