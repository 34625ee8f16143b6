"""A plan says what it does if that takes long."""

import time

import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._src.cluster import chief, progress

SLOW_S = 0.2


@pytest.fixture(autouse=True)
def speaking(monkeypatch):
    """As in a separate process: strategies of other tests may have given this one a role."""
    monkeypatch.setattr(chief, "_roles", [])
    monkeypatch.delenv("REPLICAX_PROGRESS", raising=False)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.05)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def slowly(value):
    """Takes time while it is traced, and none when it runs."""
    time.sleep(SLOW_S)
    return value + 1


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_plan_is_announced(strategy, soon, capsys):
    strategy.plan(slowly, (jnp.ones(()),), topology="cpu:2")
    said, took = lines_of(capsys)
    assert said == "replicax: planning slowly for cpu:2 …"
    assert took.startswith("replicax: planned slowly for cpu:2 in ")
