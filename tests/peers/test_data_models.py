"""Keras models and TensorFlow functions that run in datasets of tf.data, also on workers."""

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

import replicax as rx
from in_memory_servers import in_memory_strategy

pytestmark = pytest.mark.timeout(180)
TEXTS = np.array([["yes", "no"], ["no", "other"], ["other", "yes"]])
IDS = [[1, 2], [2, 0], [0, 1]]


@pytest.fixture
def stage():
    words = keras.Input((2,), dtype="string", name="words")
    return rx.keras.DataModel({"words": words}, keras.layers.StringLookup(vocabulary=["yes", "no"])(words))


def ids_of(dataset):
    return np.concatenate([np.reshape(ids, (-1, 2)) for ids in dataset.as_numpy_iterator()]).tolist()


@pytest.mark.parametrize("rows", [None, 2], ids=["row by row", "in batches"])
def test_texts(stage, rows):
    dataset = tf.data.Dataset.from_tensor_slices({"words": TEXTS})
    dataset = dataset if rows is None else dataset.batch(rows)
    assert ids_of(dataset.map(stage)) == IDS
    assert ids_of(dataset.map(lambda row: stage(row["words"]))) == IDS


def test_several_inputs_and_outputs():
    words, numbers = keras.Input((2,), dtype="string"), keras.Input((1,))
    look_up = keras.layers.StringLookup(vocabulary=["yes", "no"])
    halves = keras.layers.Rescaling(0.5)
    stage = rx.keras.DataModel([words, numbers], {"ids": look_up(words), "halves": halves(numbers)})
    dataset = tf.data.Dataset.from_tensor_slices((TEXTS, np.arange(3.0, dtype=np.float32)[:, None])).batch(3)
    (found,) = dataset.map(lambda *given: stage(list(given))).as_numpy_iterator()
    assert found["ids"].tolist() == IDS
    assert found["halves"].tolist() == [[0.0], [0.5], [1.0]]


def test_it_is_pickled_and_saved(stage, tmp_path):
    stage.save(tmp_path / "stage.keras")
    dataset = tf.data.Dataset.from_tensor_slices(TEXTS)
    for copy in (
        cloudpickle.loads(cloudpickle.dumps(stage)),
        keras.models.load_model(tmp_path / "stage.keras"),
    ):
        assert ids_of(dataset.map(copy)) == IDS


def test_a_tf_function_makes_the_dataset_of_a_worker(stage):
    with in_memory_strategy() as strategy, rx.coordinator.ClusterCoordinator(strategy) as coordinator:

        def dataset_fn(context):
            return tf.data.Dataset.from_tensor_slices(TEXTS).map(stage).batch(3)

        @tf.function
        def per_worker():
            return strategy.distribute_datasets_from_function(dataset_fn)

        iterator = iter(coordinator.create_per_worker_dataset(per_worker))
        total = coordinator.schedule(lambda it: next(it).sum(axis=0), args=(iterator,))
        assert coordinator.fetch(total).tolist() == np.sum(IDS, axis=0).tolist()
