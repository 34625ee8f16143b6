"""Runs the programs of this folder and returns what a user sees in a terminal: ``run_all``, ``check``.

``python tests/mistakes/recording.py [NAME ...]`` writes the outputs of all, or of some, into ``outputs``.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAMS = FOLDER / "programs"
OUTPUTS = FOLDER / "outputs"
QUICK_START = FOLDER.parent / "quick_start"
SOURCES = FOLDER.parents[1] / "src"
SECONDS = 90

SHOWN_PORTS = {"PORT_A": "12345", "PORT_B": "23456", "PORT_C": "34567"}
_USED_BY_ALL = (
    "numpy",
    "jax",
    "jax.numpy",
    "replicax._src.strategies.mirrored",
    "replicax._src.input.dataset",
)
_IMPORTED = {"keras": "keras", "flax": "flax.nnx", "optax": "optax"}


class Imported:
    """A process that has imported what some programs need, and forks for each of them."""

    def __init__(self, modules):
        command = [sys.executable, str(FOLDER / "run_programs.py"), *modules]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), **({"KERAS_BACKEND": "jax"} if "keras" in modules else {})},
        )

    def run(self, program, folder, output):
        request = {"program": str(program), "folder": folder, "output": output, "seconds": SECONDS}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())["code"]

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def environment():
    """The environment of a user who set nothing, but in which imports take half the time."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REPLICAX_", "KERAS_", "TF_"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": f"{QUICK_START}{os.pathsep}{SOURCES}",
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "REPLICAX_PROGRESS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def modules_of(program):
    """What a program imports and its process may have imported before, or None if it needs a new process."""
    if program.suffix == ".sh":
        return None
    text = program.read_text()
    names = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    if "tensorflow" in names or ("keras" in names and '["KERAS_BACKEND"] = "jax"\nimport keras' not in text):
        return None
    return (*_USED_BY_ALL, *(_IMPORTED[name] for name in _IMPORTED if name in names))


def free_ports():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in SHOWN_PORTS]
    ports = {name: str(each.getsockname()[1]) for name, each in zip(SHOWN_PORTS, sockets)}
    for each in sockets:
        each.close()
    return ports


def run_in_new_process(program, folder, output, ports):
    """Runs a program with Python, or with bash and free ports in PORT_A, PORT_B and PORT_C.

    Keras's file of settings is that of a new user.
    """
    shell = program.suffix == ".sh"
    with open(output, "w") as file:
        process = subprocess.Popen(
            ["bash" if shell else sys.executable, str(program)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment(), **ports, "HOME": folder},
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_all(programs):
    """Runs programs, two at a time. Yields each with its normalised output, which ends with the exit code."""
    groups = {}
    for program in programs:
        groups.setdefault(modules_of(program), []).append(program)
    queue = [(modules, program) for modules, of_group in groups.items() for program in of_group]
    servers = {}
    lock = threading.Lock()

    def run(item):
        modules, program = item
        with tempfile.TemporaryDirectory(prefix="mistake-") as folder:
            output = os.path.join(folder, ".output")
            inside = os.path.join(folder, "work")
            os.mkdir(inside)
            ports = free_ports()
            if modules is None:
                code = run_in_new_process(program, inside, output, ports)
            else:
                key = (threading.get_ident(), modules)
                if key not in servers:
                    with lock:
                        servers[key] = Imported(modules)
                code = servers[key].run(program, inside, output)
            text = Path(output).read_text(errors="replace")
            for name, port in ports.items():
                text = re.sub(rf"\b{port}\b", SHOWN_PORTS[name], text)
            return program, normalised(text, program, inside) + ended(code)

    try:
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(run, queue)
    finally:
        for server in servers.values():
            server.close()


def ended(code):
    return "[no end after 90 s]\n" if code is None else f"[exit code {code}]\n"


_VARIES = [
    (r"^(?:WARNING: All log messages before absl|[IWE]0000 00:00:).*\n", ""),  # TensorFlow's
    (r"\((?:another program answers|the deadline has passed); ", "(…; "),
    (r'^ *File "[^"]*quick_start/sitecustomize\.py".*\n(?:    .*\n)+', ""),
    (r"/\S*/site-packages/", "…/"),
    (r"/\S*/src/(?=replicax/)", "…/"),
    (r"/\S*/lib/python3\.\d+/", "…/"),
    (r'(File "…/\S+", line )\d+', r"\1…"),
    (r"(?<=\.py:)\d+(?= (?:for|traced for) )", "…"),
    (r"0x[0-9a-f]{6,}", "0x…"),
    (r"^[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ", ""),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+:?", "…"),
    (r"\[\d{10,}\]", "[…]"),
    (r"(?<=waited )\d+(?= s\b)", "…"),
    (r"\b(listens at 127\.0\.0\.1:)\d+", r"\1…"),
    (r"(?<=pid )\d+|(?<=process )\d{3,}", "…"),
]


def normalised(text, program, folder):
    """Text without what differs between two runs: folders, addresses, times."""
    text = text.replace(f"{program.parent}{os.sep}", "").replace(folder, "/home/user/work")
    for pattern, instead in _VARIES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    lines = [line.rstrip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def check(output, verdict, recorded):
    """Raises AssertionError unless an output fits its row of the table, and its messages are those on record."""
    missing = [words for words in verdict.says if words not in output]
    assert not missing, f"{missing} not in:\n{output}"
    if verdict.error:
        assert re.search(rf"(?:^|[\s.]){verdict.error}: ", output), f"no {verdict.error} in:\n{output}"
    if verdict.came in ("right", "silent"):
        assert output.endswith(ended(0)), output
    else:
        assert essential_lines(output, verdict) == essential_lines(recorded, verdict)


def essential_lines(output, verdict):
    """The lines of a message that its row of the table names, in any order of several processes, and the exit code."""
    lines = {line for line in output.splitlines() if any(words in line for words in verdict.says)}
    return [*sorted(lines), output.splitlines()[-1]]


def all_programs():
    return sorted(path for path in PROGRAMS.rglob("*") if path.suffix in (".py", ".sh"))


def output_file(program):
    return OUTPUTS / program.parent.name / f"{program.stem}.txt"


def needs_tensorflow(program):
    return program.suffix == ".py" and "import tensorflow" in program.read_text()


def main(names):
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    programs = [each for each in all_programs() if needs_tensorflow(each) == has_tensorflow]
    programs = [each for each in programs if not names or each.stem in names]
    for program, output in run_all(programs):
        file = output_file(program)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(output)


if __name__ == "__main__":
    main(sys.argv[1:])
