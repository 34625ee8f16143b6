"""The current strategy, and the context of the caller: scopes, the global strategy, threads."""

import subprocess
import sys
import threading

import pytest

import replicax as rx
from replicax import errors
from replicax._src.scope import context
from replicax._src.scope.any_strategy import StrategyView


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def other():
    return rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture(autouse=True)
def no_global_strategy():
    yield
    rx.experimental_set_strategy(None)


def test_outside_every_scope():
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()
    context = rx.get_replica_context()
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1
    assert context.strategy is rx.get_strategy()
    assert context.all_reduce("SUM", 3.0) == 3.0
    assert context.all_gather([1.0], axis=0) == [1.0]
    assert rx.get_strategy() is rx.get_strategy()


def test_the_global_strategy(strategy, other):
    for current in (strategy, other):
        rx.experimental_set_strategy(current)
        assert rx.get_strategy() is current
        assert rx.has_strategy()
        assert rx.in_cross_replica_context()
        with current.scope():
            assert rx.get_strategy() is current
        assert rx.Variable(1.0).distribute_strategy is current
    rx.experimental_set_strategy(None)
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()


def test_the_default_strategy_as_the_global_one_is_none(strategy):
    default = rx.get_strategy()
    rx.experimental_set_strategy(strategy)
    rx.experimental_set_strategy(default)
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()


def test_another_scope_under_a_global_strategy(strategy, other):
    rx.experimental_set_strategy(strategy)
    with pytest.raises(errors.MixedStrategiesError, match="Mixing different"), other.scope():
        pass
    strategy.run(lambda: None)


def test_the_global_strategy_is_seen_by_other_threads(strategy):
    rx.experimental_set_strategy(strategy)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(rx.get_strategy()))
    thread.start()
    thread.join()
    assert seen == [strategy]


def test_threads_have_separate_scopes(strategy, other):
    inside, leave, seen = threading.Event(), threading.Event(), []

    def work():
        with other.scope():
            inside.set()
            assert leave.wait(timeout=60)
            seen.append(rx.get_strategy())

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(timeout=60)
    with strategy.scope():
        assert rx.get_strategy() is strategy
        leave.set()
        thread.join()
        assert rx.get_strategy() is strategy
    assert seen == [other]


def test_leaving_a_scope_restores_the_outer_one(strategy):
    with strategy.scope():
        with pytest.raises(errors.MixedStrategiesError), rx.MirroredStrategy(["cpu:3"]).scope():
            pass
        assert rx.get_strategy() is strategy
    assert not rx.has_strategy()


def test_a_strategys_scope_inside_the_default_one(strategy):
    default = rx.get_strategy()
    with default.scope():
        assert rx.get_strategy() is default
        with strategy.scope():
            assert rx.get_strategy() is strategy
            strategy.run(lambda: None)
        assert rx.get_strategy() is default
        assert default.run(lambda: 3) == 3


def test_merge_call_is_cross_replica_context(strategy):
    seen = []

    def merge(current, text, number):
        seen.append(
            (current is strategy, rx.get_replica_context(), rx.in_cross_replica_context(), text, number)
        )
        with strategy.scope():  # its own scope may be entered
            seen.append(rx.get_strategy() is strategy)

    def step():
        rx.get_replica_context().merge_call(merge, ("text",), {"number": 5})
        return rx.get_replica_context() is None

    assert strategy.run(step) is False
    assert seen == [(True, None, True, "text", 5), True]


def test_the_scope_of_a_view_changes_one_strategy_in_one_thread(strategy, other):
    own = strategy.topology
    parts, inner = other.parts, rx.OneDeviceStrategy("cpu:3").parts
    elsewhere = []

    def look():
        elsewhere.append((strategy.topology is own, context.view_of(strategy) is not None))

    def on(parts):
        return context.Scope(strategy, view=StrategyView(strategy, parts))

    def fail_inside():
        with on(parts):
            assert strategy.topology is parts.topology
            assert (strategy.runner, strategy.bindings) == (parts.runner, parts.bindings)
            with on(inner):
                assert strategy.topology is inner.topology
                with strategy.scope():
                    assert strategy.topology is inner.topology
                    assert rx.Variable(0.0).distribute_strategy is strategy
            assert strategy.topology is parts.topology
            assert context.view_of(other) is None
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert context.view_of(strategy) is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert elsewhere == [(True, False)]
    assert strategy.topology is own
    assert context.view_of(strategy) is None


def test_scope_that_was_never_entered_says_nothing_at_the_end_of_the_program():
    program = "import replicax as rx\nscope = rx.MirroredStrategy(['cpu:0']).scope()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
