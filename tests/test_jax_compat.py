"""What replicax changes in JAX."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from replicax._src import jax_compat


def test_a_program_that_is_kept_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """Who is killed while writing it leaves what was there before; what was damaged is replaced."""

    def killed(path, data):
        with open(path, "wb") as file:
            file.write(data[:1])
        raise KeyboardInterrupt

    jax_compat.keep_programs()
    cache, _ = compilation_cache.get_file_cache(str(tmp_path))
    cache.put("f", b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.put("f", b"program")
    assert cache.get("f") == b"damaged"
    (left,) = tmp_path.glob("*.part-*")
    compilation_cache.get_file_cache(str(tmp_path))
    assert left.exists(), "somebody may be writing it"
    os.utime(left, (0, 0))
    compilation_cache.get_file_cache(str(tmp_path))
    assert not left.exists()
    cache.put("f", b"program")
    assert cache.get("f") == b"program"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_copies_share_no_buffer(is_replicated, size):
    """Programs donate the copies; whoever holds the array must not see it change."""
    value = jnp.arange(size, dtype=jnp.float32)
    if is_replicated:
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("replica",))
        value = jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    copy = jax_compat.copied(value)
    assert copy.sharding == value.sharding
    pointers = [{s.data.unsafe_buffer_pointer() for s in array.addressable_shards} for array in (copy, value)]
    assert pointers[0].isdisjoint(pointers[1])
    assert copy.tolist() == value.tolist()


def test_a_copy_of_a_numpy_array_shares_no_memory():
    value = np.ones((512, 512), np.float32)
    copy = jax_compat.copied(value)
    value[:] = 2
    assert copy[0, 0] == 1
