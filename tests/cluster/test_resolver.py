"""The simple resolver returns its arguments, and a union joins several: TensorFlow's cluster_resolver_test."""

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver, UnionResolver

PS_AND_WORKERS = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]}


def simple(cluster=PS_AND_WORKERS, *args, **kwargs):
    return SimpleClusterResolver(ClusterSpec(cluster), *args, **kwargs)


def union_of(*clusters):
    return UnionResolver(*map(simple, clusters))


# --- simple -------------------------------------------------------------------------------------------


def test_simple_resolver_returns_its_arguments():
    resolver = simple(
        task_type="ps", task_id=1, environment="cloud", num_accelerators={"GPU": 8}, rpc_layer="grpc"
    )
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 1, "cloud")
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.rpc_layer == "grpc"
    assert resolver.cluster_spec() == PS_AND_WORKERS
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "http")
    assert simple().num_accelerators("worker", 0, None) == {}


def test_simple_master():
    assert simple().master("worker", 0, rpc_layer="grpc") == "grpc://worker0:2222"
    assert simple().master("worker", 2) == "worker2:2222"
    assert simple(rpc_layer="x").master("worker", 2) == "x://worker2:2222"
    assert simple(master="m:1", task_type="worker", task_id=0).master() == "m:1"
    assert simple().master() == ""


def test_simple_needs_a_spec():
    message(
        errors.ClusterTypeError,
        lambda: SimpleClusterResolver(PS_AND_WORKERS),
        "cluster_spec must be a `tf.train.ClusterSpec`",
        "got dict",
    )
    message(errors.ClusterTypeError, lambda: simple(master=3), "master must be a string", "got 3")


# --- union --------------------------------------------------------------------------------------------


def test_union_of_one():
    assert union_of(PS_AND_WORKERS).cluster_spec() == PS_AND_WORKERS
    sparse = {"worker": {1: "a:1", 3: "b:1", 5: "c:1"}}
    assert union_of(sparse).cluster_spec() == sparse


def test_union_answers_as_its_first():
    first = simple(
        task_type="ps", task_id=1, environment="cloud", num_accelerators={"GPU": 8}, rpc_layer="grpc"
    )
    second = simple(
        task_type="worker", task_id=2, environment="local", num_accelerators={"GPU": 16}, rpc_layer="http"
    )
    union = UnionResolver(first, second)
    assert (union.task_type, union.task_id, union.environment) == ("ps", 1, "cloud")
    assert union.num_accelerators() == {"GPU": 8}
    assert union.rpc_layer == "grpc"
    union.task_type, union.task_id, union.rpc_layer = "worker", 2, "http"
    assert union.master("ps", 1).startswith("http://")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 2, "http")


def test_union_with_overrides():
    union = UnionResolver(simple(task_type="ps", task_id=1), task_type="worker", task_id=0, rpc_layer="x")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "x")
    assert union.master("worker", 1) == "x://worker1:2222"


def test_union_of_different_jobs():
    union = union_of({"ps": ["ps0:1"]}, {"worker": ["w0:1", "w1:1"]})
    assert union.cluster_spec() == {"ps": ["ps0:1"], "worker": ["w0:1", "w1:1"]}
    assert union.master() == ""
    assert union.master("worker", 1) == "w1:1"
    assert union.master("worker", 1, rpc_layer="grpc") == "grpc://w1:1"


def test_union_joins_lists():
    union = union_of({"worker": ["w4:1", "w5:1"]}, {"worker": ["w0:1", "w1:1", "w2:1"]})
    assert union.cluster_spec() == {"worker": ["w4:1", "w5:1", "w0:1", "w1:1", "w2:1"]}


def test_union_merges_by_index():
    sparse = {"worker": {3: "w0:1", 6: "w1:1", 7: "w2:1"}}
    union = union_of({"worker": {5: "w4:1", 9: "w5:1"}}, sparse)
    assert union.cluster_spec().task_indices("worker") == [3, 5, 6, 7, 9]
    assert union.cluster_spec().task_address("worker", 5) == "w4:1"
    mixed = union_of({"worker": ["w4:1", "w5:1"]}, sparse).cluster_spec()
    assert mixed == {"worker": {0: "w4:1", 1: "w5:1", 3: "w0:1", 6: "w1:1", 7: "w2:1"}}


@pytest.mark.parametrize(
    "first", [{7: "w4:1", 9: "w5:1"}, [f"w{i}:1" for i in range(8)]], ids=["sparse", "list"]
)
def test_union_of_the_same_task(first):
    union = union_of({"worker": first}, {"worker": {3 if isinstance(first, list) else 4: "x:1", 7: "y:1"}})
    text = message(
        errors.RepeatedTaskError,
        union.cluster_spec,
        "Duplicate keys detected when merging two ClusterSpecs: [",
        "7]",
        "'worker'",
    )
    assert not text.startswith(("'", '"'))
    assert issubclass(errors.RepeatedTaskError, KeyError)  # TensorFlow's


def test_union_of_nothing_or_of_other_things():
    message(errors.InvalidArgumentError, lambda: UnionResolver(), "At least one ClusterResolver is required")
    message(
        errors.InvalidArgumentError,
        lambda: UnionResolver(simple(), x=1),
        "Unexpected kwargs provided {'x': 1}",
    )
    message(
        errors.ClusterTypeError,
        lambda: UnionResolver(ClusterSpec({})),
        "All arguments must be a sub-class of `ClusterResolver.`",
        "Got ClusterSpec",
        "SimpleClusterResolver",
    )


# --- of one's own -------------------------------------------------------------------------------------


class Mine(ClusterResolver):
    task_type, task_id, environment, rpc_layer = "worker", 1, "", None

    def cluster_spec(self):
        return ClusterSpec({"worker": ["a:1", "b:1"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""

    def num_accelerators(self, task_type=None, task_id=None, config_proto=None):
        return {}


def test_resolver_of_the_user():
    me = membership_of(Mine())
    assert (me.id_in_cluster, me.num_workers, me.address) == (1, 2, "b:1")
    assert UnionResolver(Mine()).task_id == 1
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


def test_membership_of_a_resolver_without_a_task():
    message(
        errors.TaskError,
        lambda: membership_of(simple()),
        "When `cluster_spec` is given, you must also specify `task_type` and `task_id`.",
    )
    assert membership_of(simple({})).num_workers == 1
