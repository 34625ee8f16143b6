"""The text of a program that processes compare: it is equal in all of them, and differs for another program."""

import hashlib
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax._src.cluster.shared_program import SharedProgram

CALLBACKS = """
    import hashlib
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import io_callback
    from replicax._src.cluster.shared_program import SharedProgram

    def one(x):
        jax.debug.callback(print, x)
        jax.debug.print("x is {}", x)
        y = jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y + io_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    class Listener:
        def agree(self, name, text):
            assert text.count("callback(") == 4, text
            print(hashlib.sha256(text.encode()).hexdigest())
            raise SystemExit

    SharedProgram(jax.jit(one), "one", Listener())(jnp.ones(3))
"""


class Agreed(Exception):
    """Replaces the run of the program, which needs other processes."""


class Listener:
    """Replaces the other processes; keeps the values that would be compared."""

    def agree(self, name, text):
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        raise Agreed


def digest_of(function, *args):
    peers = Listener()
    with pytest.raises(Agreed):
        SharedProgram(jax.jit(function), "f", peers)(*args)
    return peers.digest


def test_calls_back_into_python_are_the_same_program_in_all_processes():
    """The text must not contain the address of a function, which differs between processes.

    Ordered callbacks need not be equal: JAX has them on one device only, where their order in the text is arbitrary.
    """
    digests = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CALLBACKS)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PADDING": "x" * 1000 * int(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
        for seed in "12"
    }
    assert len(digests) == 1, digests


TABLE = np.arange(10**6, 10**6 + 1000, dtype=np.int32)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1234567890, 1234567891), (12, 13), (TABLE, np.where(np.arange(1000) < 999, TABLE, 7))],
    ids=["ten digits", "two digits", "a table"],
)
def test_programs_that_differ_in_a_number_are_different(one, other):
    number = jnp.ones((), jnp.int32)
    same, again, different = (
        digest_of(lambda x, c=constant: x * c, number) for constant in (one, one, other)
    )
    assert same == again
    assert same != different


def test_a_number_beside_a_callback_counts():
    def with_callback(constant):
        def f(x):
            jax.debug.callback(print, x)
            return x + constant

        return f

    number = jnp.ones((), jnp.int32)
    assert digest_of(with_callback(1234567890), number) != digest_of(with_callback(1234567891), number)
