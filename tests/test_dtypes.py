"""Dtypes of other libraries: stand-ins here, the real ones in tests/peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.values.dtypes import as_dtype


class TensorFlowDtype:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"tf.{self.name}"


class TorchDtype:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


@pytest.mark.parametrize("name", ["float32", "int32", "bool", "bfloat16", "float8_e4m3fn", "uint8"])
def test_dtypes_of_other_libraries_are_accepted(name):
    assert as_dtype(TensorFlowDtype(name)) == jnp.dtype(name)
    assert as_dtype(TorchDtype(f"torch.{name}")) == jnp.dtype(name)


@pytest.mark.parametrize(
    "dtype", [float, "int8", np.float16, jnp.bfloat16, np.dtype(bool), object(), "no dtype"]
)
def test_any_other_dtype_is_left_to_jax(dtype):
    assert as_dtype(dtype) is dtype


def test_the_dtype_of_random_keys_is_left_to_jax():
    dtype = jax.random.key(0).dtype
    assert as_dtype(dtype) is dtype


@pytest.mark.parametrize("dtype", [TensorFlowDtype("int16"), TorchDtype("torch.int16")], ids=repr)
def test_dtype_of_another_library_is_accepted_by_every_function(dtype, tmp_path):
    assert rx.Variable(1, dtype=dtype).dtype == jnp.int16
    sizes = rx.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=4)(shape=(4, 1), dtype=dtype)
    assert sizes == [2, 1]
    (tmp_path / "a.csv").write_text("x\n1\n")
    dataset = rx.data.from_csv(str(tmp_path / "a.csv"), column_dtypes={"x": dtype}).batch(1)
    assert next(iter(dataset))["x"].dtype == np.int16
