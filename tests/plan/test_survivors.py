"""What a strategy whose workers go on after a death shows in a notebook, and says to a plan."""

import jax.numpy as jnp
import pytest

from replicax import errors
from surviving_members import Members, strategy_of


@pytest.fixture
def strategy(monkeypatch):
    return strategy_of(Members(3), monkeypatch)


def test_plan_names_the_other_way(strategy):
    with pytest.raises(errors.UnsupportedError, match="save_on_failure=True"):
        strategy.plan(lambda: jnp.zeros(()))


def test_notebook_shows_replicas_and_survivors(strategy):
    shown = strategy._repr_html_()
    assert "3 replicas" in shown
    assert "survivors" in shown
