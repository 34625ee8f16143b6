"""The examples with parameter servers; each runs as a person runs it, by ``replicax launch`` on this machine."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags

pytestmark = pytest.mark.rest

ROOT = pathlib.Path(__file__).parents[2]


def launched(example, *options, tasks=("--workers", "2", "--ps", "2"), prefix="chief 0"):
    """The lines that the chief of a cluster of two workers and two parameter servers prints."""
    left_out = ("KERAS_BACKEND", "TF_CONFIG", "PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": path_of_programs(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": xla_flags(optimization_level=1)}
    command = [sys.executable, "-m", "replicax", "launch", *tasks]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / example), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return [line.split("| ", 1)[1] for line in done.stdout.splitlines() if line.startswith(prefix)]


@pytest.mark.timeout(300)
def test_the_loop_learns_with_whatever_worker_is_free():
    lines = launched("parameter_server_loop.py")
    epochs = [re.fullmatch(r"epoch \d/4   loss (\S+)   accuracy (\S+)", line) for line in lines[:-1]]
    losses, accuracies = zip(*[(float(match[1]), float(match[2])) for match in epochs], strict=True)
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]  # between two epochs it may rise: gradients are of older values
    assert accuracies[-1] > 0.85
    assert lines[-1] == "400 steps"  # each of them counted, and none twice


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "least", "rows"),
    [
        (("--ids", "20000", "--epochs", "2", "--steps", "60"), 0.75, 40_000),
        pytest.param((), 0.85, 400_000, marks=pytest.mark.long),
    ],
    ids=["short", "as it is"],
)
def test_click_through_rates_are_learned_and_few_rows_travel(options, least, rows):
    first, *epochs, last = launched("click_through_rate.py", *options)
    assert first == f"{rows:,} rows of embeddings on 2 parameter servers"
    aucs = [float(re.search(r"AUC (\S+)", line)[1]) for line in epochs]
    losses = [float(re.search(r"loss (\S+)", line)[1]) for line in epochs]
    assert aucs[-1] > least  # of 0.5 by chance, and 0.93 for who knows the tastes
    assert losses[-1] < losses[0]
    travelled = int(re.fullmatch(r"([\d,]+) rows of [\d,]+ travelled in a step", last)[1].replace(",", ""))
    assert 100 < travelled < 1024


@pytest.mark.long
@pytest.mark.timeout(300)
def test_groups_end_with_the_same_parameters():
    lines = launched("local_updates.py", tasks=("--groups", "3", "--syncers", "1"), prefix="group ")
    ends = {re.match(r"test loss (\S+) accuracy (\S+)", line) for line in lines} - {None}
    assert len(ends) == 3
    assert len({match[0] for match in ends}) == 1
    assert float(ends.pop()[2]) > 0.85
