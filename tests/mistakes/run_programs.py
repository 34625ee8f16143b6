"""Runs programs, each as a process of its own that finds its imports done: ``python run_programs.py MODULE ...``.

The process imports the modules once and then, for each line of standard input, forks: the child is as good as a new
Python in which a user starts the program, a few seconds sooner. A line is ``{"program", "folder", "output", "seconds"}``,
the answer ``{"code"}``, null if the time ran out.
"""

import importlib
import json
import linecache
import os
import signal
import sys
import time
import types


def run_here(program, folder, output):
    """Runs a program as ``python program`` does in a terminal, in this process. Returns the exit code."""
    os.chdir(folder)
    with open(os.devnull) as nothing, open(output, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = [program]
    sys.path[0] = os.path.dirname(program)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = program
    linecache.checkcache(program)
    with open(program) as file:
        source = file.read()
    try:
        exec(compile(source, program, "exec"), vars(main))
    except SystemExit as error:
        return error.code
    except BaseException as error:
        own = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(own.tb_next), own.tb_next)
        return 1
    return 0


def wait(pid, seconds):
    """Returns a child's exit code, or None after killing it and what it started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve(modules):
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            sys.exit(run_here(request["program"], request["folder"], request["output"]))
        print(json.dumps({"code": wait(pid, request["seconds"])}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
