"""Datasets and values of a worker: made from the coordinator's message, read ahead, distinguished by their spec."""

import builtins
import collections
import dataclasses
import json
import pickle
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import replicax as rx
from replicax._ps.transport import structures
from replicax._ps.worker.prefetched_elements import End
from replicax._ps.worker.resources import (
    WorkerPlace,
    current_worker_index,
    dump,
    make,
)
from replicax._src.devices import memory
from replicax._src.input.elements import EmptyDatasetError
from replicax._src.input.opening import UnsupportedSourceError
from replicax._src.vocabulary.errors import ContextError, InvalidArgumentError, MissingExtraError

PLACE = WorkerPlace(index=2, num_workers=3, num_replicas_in_sync=4)
Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    """A user's class of elements."""

    x: np.ndarray
    y: np.ndarray


@pytest.fixture
def made():
    """Makes resources on a worker from a message, and closes them."""
    resources = []

    def make_one(what, kind="dataset"):
        resources.append(make(kind, dump(what), PLACE))
        return resources[-1]

    yield make_one
    for resource in resources:
        resource.close()


def rest_of(resource):
    """All remaining elements."""
    elements = []
    while not isinstance(leaves := resource.next(), End):
        elements.append(leaves)
    return elements


def test_a_function_makes_the_dataset_on_the_worker(made):
    scale = 10  # what it closes over travels with it
    dataset = made(lambda: rx.data.from_arrays((np.arange(5) * scale, np.ones((5, 2)))).batch(2))
    elements = rest_of(dataset)
    assert [leaves[0].tolist() for leaves in elements] == [[0, 10], [20, 30], [40]]
    assert dataset.spec == {
        "tree": ["tuple", [0, 0]],
        "leaves": [[[2], "int32"], [[2, 2], "float32"]],  # as JAX has them
    }
    assert {leaf.dtype.name for leaves in elements for leaf in leaves} == {"int32", "float32"}


def test_a_dataset_itself_can_be_sent(made):
    assert [leaves[0].tolist() for leaves in rest_of(made([np.arange(2), np.arange(3)]))] == [
        [0, 1],
        [0, 1, 2],
    ]


def test_a_generator_is_a_dataset(made):
    def generate():
        yield from ({"x": np.float32(i)} for i in range(3))

    dataset = made(lambda: generate())
    assert dataset.spec["tree"] == ["dict", [["x", 0]]]
    assert [float(leaves[0]) for leaves in rest_of(dataset)] == [0, 1, 2]


def test_a_grain_dataset_is_a_dataset(made):
    pytest.importorskip("grain")

    def dataset_fn():
        import grain

        return grain.MapDataset.range(6).map(lambda i: np.float32(i)).batch(3)

    assert [leaves[0].tolist() for leaves in rest_of(made(dataset_fn))] == [[0, 1, 2], [3, 4, 5]]


def test_a_distributed_dataset_is_a_dataset(made):
    def dataset_fn():
        dataset = rx.data.from_arrays(np.arange(4, dtype=np.float32)).batch(2)
        return rx.get_strategy().experimental_distribute_dataset(dataset)

    assert [leaves[0].tolist() for leaves in rest_of(made(dataset_fn))] == [[0, 1], [2, 3]]


def test_end_is_reported_each_time(made):
    dataset = made([np.zeros(2)] * 3)
    assert len(rest_of(dataset)) == 3
    for _ in range(2):
        assert "it had 3" in dataset.next().reason


def test_a_dataset_function_may_take_an_input_context(made):
    def dataset_fn(context):
        return [
            np.array([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        ]

    assert made(dataset_fn).next()[0].tolist() == [3, 2, 4]
    # An argument with a default is not passed.
    assert made(lambda size=7: [np.zeros(size)]).next()[0].shape == (7,)


def test_the_index_of_the_worker_is_known_where_its_dataset_is_made_and_read(made):
    def generate(at_start):
        for _ in range(5):
            yield np.array([at_start, current_worker_index()])

    def dataset_fn():
        return generate(current_worker_index())

    assert [leaves[0].tolist() for leaves in rest_of(made(dataset_fn))] == [[2, 2]] * 5
    with pytest.raises(ContextError, match="create_per_worker_dataset"):
        current_worker_index()


def test_variables_cannot_be_made_in_a_dataset_function(made):
    def dataset_fn():
        rx.Variable(1.0)
        return [np.zeros(2)]

    with pytest.raises(InvalidArgumentError, match="Creating variables in `dataset_fn` is not allowed"):
        made(dataset_fn)
    rx.Variable(1.0)  # elsewhere as before


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (lambda: 1 // 0, ZeroDivisionError, "division"),
        (lambda: None, UnsupportedSourceError, "not a dataset"),
        (lambda: [], EmptyDatasetError, "no elements"),
        (lambda: [np.array(["text"])], Exception, "text"),
    ],
)
def test_errors_while_making_a_dataset(made, what, error, text):
    with pytest.raises(error, match=text):
        made(what)


def test_later_errors_replace_their_element(made):
    def generate():
        yield np.zeros(1)
        yield np.ones(1)
        raise OSError("the file is gone")

    dataset = made(lambda: generate())
    assert [float(dataset.next()[0][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the file is gone"):
        dataset.next()


def test_elements_of_another_structure_raise(made):
    dataset = made([{"x": np.zeros(1)}, {"y": np.zeros(1)}])
    dataset.next()
    with pytest.raises(InvalidArgumentError, match="same structure"):
        dataset.next()


def test_only_some_elements_are_read_ahead(made):
    taken = []

    def generate():
        for number in range(100):
            taken.append(number)
            yield np.zeros(500_000)

    before = threading.enumerate()
    dataset = make("dataset", _by_reference(generate), PLACE)
    try:
        deadline = time.monotonic() + 60
        while len(taken) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert 2 <= len(taken) <= 5
    finally:
        dataset.close()
    begun = [thread for thread in threading.enumerate() if thread not in before]
    for thread in begun:
        if thread.name == "replicax-prefetch":
            thread.join(60)
            assert not thread.is_alive()


_HERE = {}


def _by_reference(function):
    """The result of ``dump`` for an object of this process that must not leave it."""
    _HERE["it"] = function
    return dump(_Reference())


class _Reference:
    def __call__(self):
        return _HERE["it"]()

    def __reduce__(self):
        return _Reference, ()


def test_elements_of_a_dataset_that_reuses_arrays_are_copied(made):
    def generate():
        array = np.zeros(2, np.float32)
        for number in range(4):
            array[:] = number
            yield array

    elements = rest_of(made(lambda: generate()))
    assert [leaves[0].tolist() for leaves in elements] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_narrowed_arrays_are_not_copied_again(made, monkeypatch):
    copied = []
    copy = memory.copy
    monkeypatch.setattr(memory, "copy", lambda array: copied.append(array.dtype.name) or copy(array))
    made([(np.arange(3), np.ones(3, np.float32))]).next()
    made((np.arange(3), np.ones(3, np.float32)), kind="value").next()
    assert copied == ["float32"] * 2


def test_leaves_are_contiguous_and_scalars_stay_scalars(made):
    element = (np.arange(6.0).reshape(2, 3).T, 3.0, np.ones(2, ml_dtypes.bfloat16))
    dataset = made([element])
    assert dataset.spec["leaves"] == [[[3, 2], "float32"], [[], "float32"], [[2], "bfloat16"]]
    leaves = dataset.next()
    assert all(leaf.flags.c_contiguous for leaf in leaves)
    np.testing.assert_array_equal(leaves[0], element[0])


def test_a_value_is_the_same_each_time(made):
    value = made(lambda: {"index": current_worker_index()}, kind="value")
    assert value.spec == {"tree": ["dict", [["index", 0]]], "leaves": [[[], "int32"]]}
    assert [int(value.next()[0]) for _ in range(3)] == [2, 2, 2]
    assert made(np.arange(3), kind="value").next()[0].tolist() == [0, 1, 2]


def test_unknown_kinds_raise():
    with pytest.raises(InvalidArgumentError, match="dataset, value; got 'table'"):
        make("table", dump(1), PLACE)


def test_unsendable_objects_raise_at_once():
    lock = threading.Lock()
    with pytest.raises(InvalidArgumentError, match=r"TypeError: .*lock"):
        dump(lambda: lock)


def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def import_one(name, *rest, **more):
        if name == "cloudpickle":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", import_one)
    with pytest.raises(MissingExtraError, match=r"the extra ps"):
        dump(1)


# --- structures ---------------------------------------------------------------------------------------

NESTS = [
    1.0,
    None,
    (),
    [1.0, (2.0, None)],
    {"b": 1.0, "a": {"d": [2.0], "c": 3.0}},
    collections.OrderedDict([("b", 1.0), ("a", 2.0)]),
    Pair(1.0, {"x": (2.0, 3.0)}),
    {3: 1.0, 1: 2.0},
]


@pytest.mark.parametrize("pytree", NESTS, ids=repr)
def test_structure_is_sent_as_json(pytree):
    import jax

    structure = json.loads(json.dumps(structures.described(pytree)))
    again = structures.rebuilt(structure, jax.tree.leaves(pytree))
    assert again == pytree
    assert type(again) is type(pytree)


def test_elements_that_are_dataclasses_are_rebuilt(made):
    dataset = made([Batch(np.zeros(2), np.ones(1))] * 2)
    element = structures.rebuilt(dataset.spec["tree"], dataset.next())
    assert isinstance(element, Batch)
    assert (element.x.shape, element.y.shape) == ((2,), (1,))


def test_missing_class_is_named():
    with pytest.raises(InvalidArgumentError, match=r"nowhere\.Batch"):
        structures.rebuilt(["dataclass", "nowhere", "Batch", [0]], [1.0])


@pytest.mark.parametrize(
    ("module", "name"), [("os", "system"), ("builtins", "dict"), ("subprocess", "Popen")]
)
def test_worker_cannot_make_the_coordinator_call_other_classes(module, name):
    with pytest.raises(InvalidArgumentError, match="does not have"):
        structures.rebuilt(["named", module, name, [0]], ["true"])


def test_class_inside_a_function_raises():
    Inner = collections.namedtuple("Inner", "x")
    Inner.__qualname__ = "f.<locals>.Inner"
    with pytest.raises(InvalidArgumentError, match="at the top level of a module"):
        structures.described(Inner(1.0))


def test_keys_that_json_changes_raise():
    with pytest.raises(InvalidArgumentError, match=r"the key \(1, 2\)"):
        structures.described({(1, 2): 1.0})


def test_flags_of_absl_are_sent_by_value(monkeypatch):
    flags = pytest.importorskip("absl.flags")
    values = flags.FlagValues()
    flags.DEFINE_integer("rows", 3, "", flag_values=values)
    values(["program", "--rows=5"])
    made = pickle.loads(dump(lambda: values.rows).tobytes())
    assert made() == 5
    monkeypatch.setattr(flags, "FLAGS", values)
    values.rows = 7
    assert made() == 5
    assert pickle.loads(dump(lambda: values.rows).tobytes())() == 7  # a worker has flags of its own
