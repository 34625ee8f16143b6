"""What replicax changes in JAX."""

import os
import pathlib

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
