"""The line of user code that a running program calls, as heartbeats report it."""

import threading

import jax
import numpy as np

from replicax._src.user_code import user_line_of_callback


def test_callback_of_a_program_is_found_and_other_threads_are_not():
    found = []

    def called_back(x):
        thread = threading.Thread(target=lambda: found.append(user_line_of_callback()))
        thread.start()
        thread.join()
        return np.asarray(x)

    def program(x):
        return jax.pure_callback(called_back, jax.ShapeDtypeStruct((), np.float32), x)

    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        jax.block_until_ready(jax.jit(program)(np.float32(1)))
    finally:
        stop.set()
        other.join()
    (line,) = found
    assert line is not None
    assert line.endswith(" in called_back")
