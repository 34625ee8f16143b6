"""The core runs without diagnostics, and without the table of TensorFlow's names; messages are Python's own then."""

import os
import subprocess
import sys

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src import hooks
from replicax._src.user import listening

WITHOUT = """
import sys
from replicax._src import parts
del parts.HOOKS["diagnostics"]
import jax, jax.numpy as jnp
import replicax as rx

strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    w = rx.Variable(2.0)

def step(x):
    with rx.GradientTape() as tape:
        loss = jnp.mean((w * x) ** 2)
    gradient = rx.get_replica_context().all_reduce("MEAN", tape.gradient(loss, w))
    w.assign_sub(0.1 * gradient)
    return loss, x * w

loss, each = strategy.run(step, args=(1.0,))
strategy.run(step, args=(each,))
assert float(rx.function(lambda: strategy.reduce("SUM", strategy.run(lambda: w + 1.0), axis=None))()) > 2
strategy.run(step, args=(1.0,), options=rx.RunOptions(eager=True))
for call, error in (
    (lambda: strategy.run(lambda x: float(x), args=(jnp.ones(()),)), jax.errors.ConcretizationTypeError),
    (lambda: rx.train, AttributeError),
    (lambda: w.no_such_name, AttributeError),
    (lambda: strategy.no_such_name, AttributeError),
):
    try:
        call()
    except error as caught:
        assert type(caught) is error, caught
        assert "Write" not in str(caught) and not getattr(caught, "__notes__", None), caught
    else:
        raise AssertionError(error)
assert not [name for name in sys.modules if name.startswith("replicax._src.diagnostics")]
"""


@pytest.mark.timeout(180)
def test_programs_run_without_diagnostics_and_errors_stay_as_they_are():
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=150, env=environ)


@pytest.fixture
def without(monkeypatch):
    """Leaves a hook out, and asks for the listener again."""

    def leave_out(name):
        monkeypatch.delitem(hooks.HOOKS, name)
        listening.listener.cache_clear()

    yield leave_out
    listening.listener.cache_clear()


def test_fit_runs_without_diagnostics(without):
    without("diagnostics")
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    losses = model.fit(
        np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), batch_size=4, epochs=2, verbose=0
    )
    assert losses.history["loss"][1] < losses.history["loss"][0]


@pytest.mark.parametrize("option", ["check_finite", "check_same"])
def test_a_check_that_the_user_asks_for_is_an_error_without_diagnostics(without, option):
    without("diagnostics")
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    options = rx.RunOptions(**{option: True})
    with pytest.raises(rx.errors.MissingPartError, match=rf"RunOptions\({option}=True\)"):
        strategy.run(lambda: jnp.log(-1.0), options=options)
    with pytest.raises(rx.errors.MissingPartError, match=option):
        rx.function(lambda: strategy.run(lambda: jnp.log(-1.0), options=options))()
    assert jnp.isnan(strategy.run(lambda: jnp.log(-1.0)).values[0])  # nothing is left behind


@pytest.fixture
def without_migrate(monkeypatch):
    """A checkout without the part that has the table of names."""
    monkeypatch.setitem(hooks.HOOKS, "names_of_tensorflow", "replicax._no_such_part.table")
    hooks.hook.cache_clear()
    yield
    hooks.hook.cache_clear()


def test_without_the_table_of_names_errors_are_pythons_own(without_migrate):
    with pytest.raises(AttributeError, match=r"^module 'replicax' has no attribute 'train'$"):
        rx.train
    with pytest.raises(AttributeError) as caught, rx.MirroredStrategy(["cpu:0"]).scope():
        jnp.reduce_mean(1.0)
    assert not getattr(caught.value, "__notes__", ())
    with pytest.raises(rx.errors.TracedConditionError, match=r"Write jax\.debug\.print"):  # needs no table
        rx.MirroredStrategy(["cpu:0"]).run(lambda x: float(x), args=(jnp.ones(()),))
