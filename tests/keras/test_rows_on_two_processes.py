"""The program of docs/comparison.md on two processes: on replicax it prints what one device prints; on Keras, the page's.

`make test-versions` runs this file with Keras 3.15.1 and with the nightly build of 3.16 whose numbers the page has.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest
from packaging.version import Version

from checks import path_of_programs, xla_flags
from replicax._src.cluster.machine_layout import free_ports

pytestmark = [pytest.mark.timeout(200), pytest.mark.rest]
LIMIT_S = 90
SILENCE_S = 15  # process 0 prints nothing for that long after process 1
PAGE = (Path(__file__).parents[2] / "docs/comparison.md").read_text()
PROGRAM = re.search(r"```python\n(# rows\.py\n.*?)```", PAGE, re.DOTALL)[1]
TABLE = re.search(r"<!-- rows -->\n\n(.*?)\n<!-- /rows -->", PAGE, re.DOTALL)[1]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]
SHARDS_KERAS_DATASETS = Version(keras.__version__) >= Version("3.16.dev0")
PRINTED = re.compile(r"^\d+ steps, loss .*$", re.MULTILINE)


class Program:
    """A Python process, whose output goes to a file."""

    def __init__(self, arguments, folder, environment, output):
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=environment, stdout=file, stderr=file
            )

    def text(self):
        return self._output.read_text()

    def wait(self):
        """The output, after the end of the process."""
        self.process.wait(LIMIT_S)
        return self.text()

    def printed(self):
        """The line of the program, as soon as it is there; the process may wait after it."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            is_over = self.process.poll() is not None  # first: it may print and end meanwhile
            if found := PRINTED.search(self.text()):
                return found[0]
            assert not is_over, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def started(tmp_path):
    """``started(*arguments, **environment)``: a process in a folder that has the program; it ends with the test."""
    (tmp_path / "rows.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": path_of_programs(),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
    }
    with contextlib.ExitStack() as stack:

        def start(*arguments, **variables):
            output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
            program = Program(arguments, tmp_path, {**environment, **variables}, output)
            stack.callback(program.end)
            return program

        yield start


def on_keras(started, rows):
    """The two processes of `keras.distribution`."""
    variables = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"localhost:{free_ports(1)[0]}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    }
    return [
        started("rows.py", "keras", rows, **variables, KERAS_DISTRIBUTION_PROCESS_ID=str(i)) for i in (0, 1)
    ]


@pytest.mark.parametrize(("rows", "expected"), [row[:2] for row in ROWS])
def test_two_processes_on_replicax_print_what_one_device_prints(started, rows, expected):
    assert PRINTED.findall(started("rows.py", "one", rows).wait()) == [expected]
    launched = started("-m", "replicax", "launch", "--plain", "--workers", "2", "rows.py", "replicax", rows)
    assert sorted(re.findall(r"^(worker \d) \| (\d+ steps, .*)$", launched.wait(), re.MULTILINE)) == [
        ("worker 0", expected),
        ("worker 1", expected),
    ]


if SHARDS_KERAS_DATASETS:

    @pytest.mark.parametrize(("rows", "expected"), [(row[0], row[2:]) for row in ROWS])
    def test_keras_gives_each_process_whole_batches(started, rows, expected):
        first, second = on_keras(started, rows)
        assert second.printed() == expected[1]
        if expected[0] != "waits":
            assert first.printed() == expected[0]
        else:
            time.sleep(SILENCE_S)
            assert first.process.poll() is None
            assert not PRINTED.search(first.text())

else:

    def test_keras_refuses_its_own_dataset_on_two_processes(started):
        for program in on_keras(started, "64"):
            output = program.wait()
            assert program.process.returncode == 1, output
            assert re.search(r"ValueError: .*must be provided as a `tf\.data\.Dataset` instance", output)
