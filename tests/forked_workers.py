"""A process that imports JAX, Keras and replicax once, and forks workers of ``forked_jobs.py``: ``python
forked_workers.py``."""

import importlib
import json
import os
import runpy
import sys


def serve():
    """Forks for each line of standard input, ``{"script", "environment", "output"}``, and answers with the process id.

    ``{"pid"}`` asks for the exit code of one, null while it runs.
    """
    for name in ("numpy", "jax", "jax.numpy", "keras", "replicax._src.strategies.multi_worker_mirrored"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        elif pid := os.fork():
            print(json.dumps(pid), flush=True)
        else:
            run(request)
            return


def run(request):
    """Runs a script in this process, as ``python script`` does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    serve()
