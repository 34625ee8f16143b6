"""A thread notices SIGTERM, and other handlers continue to get their signals. Each test runs in a separate process."""

import subprocess
import sys
import textwrap

import pytest

import replicax

pytestmark = pytest.mark.timeout(120)

# Without the imports of replicax/__init__.py: JAX takes a second, and this needs none.
HEAD = f"""
import os, signal, sys, threading, time, types
sys.modules["replicax"] = package = types.ModuleType("replicax")
package.__path__ = {replicax.__path__!r}
from replicax._src.preemption import sigterm
came = threading.Event()
at = []
def come():
    at.append(time.monotonic())
    came.set()
def terminate(pid=None):
    os.kill(pid or os.getpid(), signal.SIGTERM)
"""


def run(program, timeout_s=110):
    result = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return result.returncode, result.stdout.split(), result.stderr


def test_signal_is_noticed_while_the_main_thread_runs_native_code():
    """A Python handler would run only afterwards."""
    code, printed, errors = run("""
    import jax, jax.numpy as jnp, numpy as np
    work = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ x), x))
    x = jnp.ones((700, 700)) / 700
    np.asarray(work(x, 1))
    sigterm.listen(come)
    sent = []
    def send():
        sent.append(time.monotonic())
        terminate()
    num_rounds = 100
    for _ in range(6):  # longer each time: how long it takes, and who has his turn when, is the machine's
        came.clear(), at.clear(), sent.clear()
        sender = threading.Timer(0.1, send)
        sender.start()
        np.asarray(work(x, num_rounds))
        ended = time.monotonic()
        sender.join()
        assert came.wait(60)
        is_noticed = at[0] - sent[0] < (ended - sent[0]) / 2
        if is_noticed:
            break
        num_rounds *= 2
    print(is_noticed)
    """)
    assert (code, printed) == (0, ["True"]), errors


def test_other_handlers_get_their_signals_too():
    """asyncio has the wake-up descriptor, before and after."""
    code, printed, errors = run("""
    import asyncio
    async def main():
        loop, mine = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, mine.set)
        token = sigterm.listen(come)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(mine.wait(), 10)
        loop.remove_signal_handler(signal.SIGUSR1)  # which takes the descriptor away from all
        sigterm.tend()
        terminate()
        assert await asyncio.to_thread(came.wait, 10)
        mine.clear(), came.clear()
        loop.add_signal_handler(signal.SIGUSR1, mine.set)  # and now takes it for itself
        terminate()
        assert await asyncio.to_thread(came.wait, 10)  # by the handler, late
        sigterm.ignore(token)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(mine.wait(), 10)
        print("all")
    asyncio.run(main())
    """)
    assert (code, printed) == (0, ["all"]), errors


def test_without_listeners_sigterm_ends_the_process_again():
    code, printed, errors = run("""
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    for _ in range(3):
        tokens = [sigterm.listen(come), sigterm.listen(come)]
        sigterm.ignore(tokens[0])
        terminate()
        assert came.wait(10)
        came.clear()
        sigterm.ignore(tokens[1])
    assert before == (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1))
    print("back", flush=True)
    terminate()
    time.sleep(10)
    """)
    assert (code, printed) == (-15, ["back"]), errors


def test_the_last_listener_may_go_in_another_thread():
    code, printed, errors = run("""
    token = sigterm.listen(come)
    thread = threading.Thread(target=sigterm.ignore, args=(token,))
    thread.start()
    thread.join()
    terminate()
    time.sleep(10)
    """)
    assert (code, printed) == (-15, []), errors


def test_signal_of_a_forked_process_is_not_ours():
    """Data loaders fork their workers, and end them by SIGTERM."""
    code, printed, errors = run("""
    sigterm.listen(come)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"x")  # what is to be done in a process that was forked off has been done
        time.sleep(30)
        os._exit(1)
    assert os.read(reading, 1)
    terminate(child)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, status
    print(came.wait(0.5))
    """)
    assert (code, printed) == (0, ["False"]), errors


def test_only_the_main_thread_may_begin():
    code, printed, errors = run("""
    from replicax._src.vocabulary.errors import ContextError
    def begin():
        try:
            sigterm.listen(come)
        except ContextError as error:
            print("termination_watcher_fn" in str(error))
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    """)
    assert (code, printed) == (0, ["True"]), errors
