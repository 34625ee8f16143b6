"""``slowed``: a task of a ``LocalCluster`` that runs only a part of the time."""

import contextlib
import threading

PERIOD_S = 0.05


@contextlib.contextmanager
def slowed(task, share):
    """Inside, stops and resumes the process of a task alternately, so that it runs ``share`` of the time."""
    is_over = threading.Event()

    def run():
        while task.is_running:
            task.stop()
            if is_over.wait(PERIOD_S * (1 - share)):
                break
            task.resume()
            if is_over.wait(PERIOD_S * share):
                break
        task.resume()

    thread = threading.Thread(target=run, name="slowed task", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(5)
        assert not thread.is_alive()
