"""Tables in notebooks: they are escaped, need no other resources, and change nothing."""

import html.parser
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax._src.cluster.spec import Task
from replicax._testing.local_tasks import ClusterResults, TaskResult


class Reader(html.parser.HTMLParser):
    """The text of a page; tags must be closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], set(), {}, []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes.update(attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(value):
    """The text that a notebook shows of a value."""
    reader = Reader()
    reader.feed(value._repr_html_())
    assert not reader.open
    assert not reader.tags & {"script", "link", "img", "iframe", "style"}
    assert not {"src", "href", "onclick"} & reader.attributes.keys()
    assert (
        "background" not in str(reader.attributes.get("style")) or "transparent" in reader.attributes["style"]
    )
    return " ".join(reader.texts)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: rx.MirroredStrategy(2),
            ["MirroredStrategy: 2 replicas", "replicated on every device", "cpu:1"],
        ),
        (lambda: rx.OneDeviceStrategy("cpu:1"), ["OneDeviceStrategy: 1 replica", "cpu:1"]),
        (
            lambda: rx.MirroredStrategy(4, shard_state="optimizer", shard_size=2),
            ["sharded over 2 replicas: those of optimizers"],
        ),
        (lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:1"), ["on cpu:1"]),
        (rx.get_strategy, ["default strategy"]),
        (lambda: rx.MirroredStrategy(8), ["cpu:7"]),
    ],
)
def test_strategies(make, said):
    text = shown(make())
    for one in said:
        assert one in text


def test_many_replicas_are_cut_short():
    from replicax._src.drawing import html

    text = html.table(("a",), [(i,) for i in range(100)])
    assert "… and 85 more" in text
    assert ">99<" not in text


def test_per_replica(strategy):
    value = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * jnp.ones(2))
    jax.block_until_ready(value.stored)
    before = value.is_shared
    text = shown(value)
    assert value.is_shared == before, "a value that was looked at may still be donated"
    for one in ("PerReplica of 2", "cpu:0", "cpu:1", "float32[2]", "[0. 0.]", "[1. 1.]"):
        assert one in text


def test_uneven_and_large_components(strategy):
    dataset = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones((3, 2), "float32")).batch(3)
    )
    value = next(iter(dataset))
    jax.block_until_ready(value.stored)
    assert "float32[2, 2]" in shown(value)
    assert "float32[1, 2]" in shown(value)
    large = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * jnp.ones(1000))
    assert "float32[1000] …" in " ".join(shown(large).split())


def test_repr_does_not_wait_for_a_computation(strategy, monkeypatch):
    value = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * jnp.ones(2))
    monkeypatch.setattr(type(value.stored), "is_ready", lambda self: False)
    assert shown(value).count("being computed") == 2


def test_donated_values(strategy):
    (value,) = (strategy.run(lambda: jnp.ones(2)),)
    value.donate()
    assert "given to a program" in shown(value)


def test_datasets_are_not_read(strategy):
    read = []

    def batches():
        read.append(1)
        yield np.ones((2, 1), "float32")

    dataset = strategy.experimental_distribute_dataset(batches())
    assert "DistributedDataset for 2 replicas" in shown(dataset)
    assert "prefetch" in shown(dataset)
    assert read == []
    iterator = iter(dataset)
    assert " at 0x" not in repr(iterator)
    iterator.close()
    assert "closed" in repr(iterator)


def test_variables(strategy):
    with strategy.scope():
        variable = rx.Variable([1.0, 2.0], name="<b>w</b>")
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    jax.block_until_ready(variable.value)
    text = shown(variable)
    for one in ("<b>w</b>", "float32[2]", "whole on each of 2 devices", "[1. 2.]"):
        assert one in text
    assert "one component on each of 2 replicas" in shown(total)


def test_variables_on_servers_are_not_fetched():
    with in_memory_strategy(1, 2) as strategy, strategy.scope():
        variable = rx.Variable(np.ones(3, "float32"))
        assert "nowhere yet" in shown(variable)
        variable.assign(np.zeros(3, "float32"))
        variable._value.holder = types.SimpleNamespace()  # which cannot read
        assert "ps " in shown(variable)
        assert "value" not in repr(variable), "nor is its text"
        assert "parameter servers" in shown(strategy)


def test_values_combined_over_processes_are_not_read(strategy, monkeypatch):
    with strategy.scope():
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    assert "value=0.0" in repr(total)
    monkeypatch.setattr(type(total), "_is_far", lambda self: True)
    monkeypatch.setattr(type(total), "read_value", None)
    assert "value" not in repr(total)


def test_plans(strategy):
    plan = strategy.plan(lambda x: x + 1, (jnp.ones(3),), topology="cpu:2")
    assert repr(plan) == str(plan)
    assert "the whole report" in shown(plan)
    assert "It fits" in shown(plan)
    assert "prefers-color-scheme" in plan.to_svg(), "a file is read on light and on dark pages"
    assert "prefers-color-scheme" not in plan._repr_html_(), "a picture in a page has the page's colours"


def test_results_of_a_cluster():
    results = ClusterResults([TaskResult(Task("worker", 0), 3, None, ("a", "<last>"), ())])
    assert repr(results) == "ClusterResults(worker 0: exit code 3)"
    assert "<last>" in shown(results)


def test_random_keys_are_described_without_their_values(strategy):
    keys = strategy.run(lambda: jax.random.key(rx.get_replica_context().replica_id_in_sync_group))
    assert "PerReplica" in shown(keys)
    with strategy.scope():
        assert "key<fry>" in shown(rx.Variable(jax.random.key(0)))
