"""Tensors, variables and dtypes of TensorFlow, torch and others as arguments of functions that are traced."""

import h5py
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import torch

import replicax as rx
from checks import message
from replicax.errors import InvalidArgumentError, NarrowingError


@pytest.mark.parametrize("make", [tf.constant, torch.tensor], ids=["tf", "torch"])
def test_tensors_are_inputs_of_one_program(strategy, make):
    traced = []

    def total(batch):
        traced.append("run")
        return jnp.sum(batch["x"])

    @rx.function
    def step(x):
        traced.append("function")
        return 2 * x

    for number in range(3):
        x = make(np.full(3, number, np.float32))
        result = strategy.experimental_local_results(strategy.run(total, args=({"x": x},)))
        assert float(result[1]) == 3 * number
        assert step(x).tolist() == [2 * number] * 3
    assert sorted(traced) == ["function", "run"]


@pytest.mark.parametrize(
    "tensor", [tf.ones(2, tf.bfloat16), torch.ones(2, dtype=torch.bfloat16)], ids=["tf", "torch"]
)
def test_bfloat16_stays(tensor):
    assert rx.function(lambda x: x + 1)(tensor).dtype == jnp.bfloat16


@pytest.mark.parametrize("tensor", [tf.constant([1, 2**40]), torch.tensor([1, 2**40])], ids=["tf", "torch"])
def test_ids_of_64_bits_raise(strategy, tensor):
    message(NarrowingError, lambda: strategy.run(lambda ids: ids, args=(tensor,)), "args[0]", "1099511627776")
    dataset = strategy.experimental_distribute_dataset([{"ids": tensor}])
    message(NarrowingError, lambda: next(iter(dataset)), "batch['ids']", "1099511627776")


def test_ids_of_tf_data_raise(strategy):
    dataset = tf.data.Dataset.from_tensor_slices({"ids": [1, 2**40, 5, 2**31 + 7]}).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    message(NarrowingError, lambda: next(iter(distributed)), "batch['ids']", "1099511627776")


def test_parameters_files_and_frames_raise(strategy, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        refused = {
            "dataset[start:stop]": file.create_dataset("rows", data=np.ones(3)),
            ".to_numpy()": pd.DataFrame({"a": [1.0]}),
            "detach()": torch.nn.Parameter(torch.ones(2)),
        }
        refused_too = {".to_numpy()": pd.Series([1.0])}
        for what in (refused, refused_too):
            for says, value in what.items():
                message(InvalidArgumentError, lambda v=value: strategy.run(lambda x: 1.0, args=(v,)), says)
                message(InvalidArgumentError, lambda v=value: rx.function(lambda x: 1.0)(v), says)


def test_text_stays_a_constant():
    text = tf.constant(["a", "b"])
    seen = []
    rx.function(lambda x: seen.append(x))(text)
    assert seen[0] is text


@pytest.mark.parametrize(
    "dtype", [tf.float16, torch.float16, tf.bfloat16, torch.bfloat16, tf.int32, torch.int32], ids=str
)
def test_dtypes_are_accepted(dtype):
    expected = jnp.dtype(str(getattr(dtype, "name", dtype)).removeprefix("torch."))
    assert rx.Variable(1, dtype=dtype).dtype == expected
    partitioner = rx.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=2 * expected.itemsize)
    assert partitioner(shape=(4, 1), dtype=dtype) == [2, 1]


def test_variable_is_created_from_a_tensor_and_a_tf_variable():
    assert rx.Variable(tf.Variable([1.0, 2.0])).value.tolist() == [1, 2]
    assert rx.Variable(torch.ones(2), dtype=torch.float16).dtype == jnp.float16


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (tf.sparse.from_dense(np.eye(2)), "a SparseTensor of tensorflow, not an array: it is sparse"),
        (tf.ragged.constant([[1.0, 2.0], [3.0]]), "a RaggedTensor of tensorflow, not an array"),
        (tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2])), "rx.IndexedSlices("),
    ],
    ids=["sparse", "ragged", "slices"],
)
def test_composite_tensors_raise_an_error_that_says_how_to_pass_them(strategy, value, says):
    message(InvalidArgumentError, lambda: strategy.run(lambda x: x, args=(value,)), "args[0] is ", says)
