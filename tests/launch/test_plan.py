"""``replicax plan``: scripts as users write them, run up to their first program."""

import json
import os
import signal
import subprocess
import sys

import pytest

from replicax.__main__ import main

pytestmark = pytest.mark.timeout(240)

# 4 TB of weights: no machine has so much memory, so no weight is allocated. One replica, whose batches are plain
# arrays.
HUGE = """
import sys
import keras, numpy as np, replicax as rx

print("arguments", sys.argv[1:])
strategy = rx.MirroredStrategy(["cpu:0"])
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1_000_000), keras.layers.Dense(1_000_000)])
    optimizer = keras.optimizers.SGD()

def train_step(x):
    with rx.GradientTape() as tape:
        loss = rx.nn.compute_average_loss(keras.ops.mean(model(x), axis=1))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

@rx.function
def step(x):
    return strategy.reduce("sum", strategy.run(train_step, args=(x,)), axis=None)

dataset = rx.data.from_arrays(np.ones((64, 8), "float32")).batch(16)
for x in strategy.experimental_distribute_dataset(dataset):
    step(x)
    print("this was run")
"""


def plan(tmp_path, source, *options, arguments=()):
    script = tmp_path / "train.py"
    script.write_text(source)
    command = [sys.executable, "-m", "replicax", "plan", *options, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.rest
def test_a_model_larger_than_any_machine(tmp_path):
    behind = ["--fast", "--topology", "cpu:4", "1e-3", "--json", "--", "--json"]
    done = plan(tmp_path, HUGE, arguments=behind)
    assert done.returncode == 3, done.stderr
    facts = json.loads(done.stdout)
    assert facts["name"] == "step"
    assert (facts["num_replicas"], facts["rows_per_replica"], facts["global_batch"]) == (4, 16, 64)
    weights = 4 * (8 * 1_000_000 + 1_000_000 + 1_000_000 * 1_000_000 + 1_000_000)
    assert not facts["fits"]
    assert weights <= facts["memory"]["arguments"] <= weights + 4096
    assert facts["flops"]["float32"] > 2 * 16 * 1e12
    assert "arguments ['--fast', '1e-3', '--json']" in done.stderr
    assert "this was run" not in done.stderr


FIT = """
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
rows = np.ones((64, 8), "float32")
model.fit(rows, rows[:, :4], batch_size=4 * strategy.num_replicas_in_sync)
"""
OF_SEVERAL_TASKS = """
import json, os, keras, numpy as np, replicax as rx

tasks = {"worker": ["localhost:1", "localhost:2"], **MORE}
os.environ["TF_CONFIG"] = json.dumps({"cluster": tasks, "task": TASK})
"""


def test_a_script_for_tpus(tmp_path):
    """A script for a TPU with a name and a device assignment, as on Google's machines."""
    source = """
import keras, numpy as np, replicax as rx

resolver = rx.cluster_resolver.TPUClusterResolver("my-tpu")
rx.config.experimental_connect_to_cluster(resolver)
topology = rx.tpu.experimental.initialize_tpu_system(resolver)
assignment = rx.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
strategy = rx.TPUStrategy(resolver, assignment)
"""
    done = plan(tmp_path, source + FIT, "--topology", "cpu:8", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["num_replicas"], facts["num_logical_devices"]) == (4, 2)
    assert (facts["rows_per_replica"], facts["global_batch"]) == (4, 16)
    assert "8 virtual device(s) stand for the TPU's cores" in done.stderr


@pytest.mark.long
def test_a_script_of_several_workers(tmp_path):
    source = OF_SEVERAL_TASKS.replace("MORE", "{}").replace("TASK", '{"type": "worker", "index": 1}')
    source += "strategy = rx.MultiWorkerMirroredStrategy()" + FIT
    done = plan(tmp_path, source, "--topology", "cpu:8", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["num_replicas"], facts["rows_per_replica"]) == (8, 4)
    assert "does not wait for the other workers" in done.stderr


@pytest.mark.long
def test_a_script_with_parameter_servers(tmp_path):
    source = OF_SEVERAL_TASKS.replace("MORE", '{"ps": ["localhost:3"]}').replace("TASK", '{"type": "chief"}')
    resolver = "rx.cluster_resolver.TFConfigClusterResolver()"
    source += f"strategy = rx.ParameterServerStrategy({resolver})" + FIT
    done = plan(tmp_path, source, "--topology", "cpu:8")
    assert (done.returncode, done.stdout) == (1, "")
    told = " ".join(done.stderr.split())
    assert "UnsupportedError: ParameterServerStrategy" in told
    assert "train.py:6" in told


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import sys; sys.exit('usage: train.py DATA')", ["usage: train.py DATA\n", "ended itself"]),
        (
            "def load():\n    open('missing')\nload()",
            ["FileNotFoundError", "line 2, in load", "failed before"],
        ),
        ("import replicax as rx\nrx.MirroredStrategy(['tpu:7'])", ["DeviceError: ", "train.py:2"]),
        ("def f(:\n    pass", ["SyntaxError", "failed before"]),
    ],
)
def test_scripts_that_end_before(tmp_path, source, told):
    done = plan(tmp_path, source, "--topology", "cpu:2")
    assert (done.returncode, done.stdout) == (1, "")
    for text in told:
        assert text in done.stderr
    assert "runpy" not in done.stderr
    assert "planned_script" not in done.stderr


@pytest.mark.long
def test_a_module_whose_functions_loop_over_datasets(tmp_path):
    """Such functions run as Python: the first strategy.run in them is the first program."""
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rows.py").write_text("import numpy as np\nBATCH = np.ones((6, 3), np.float32)\n")
    (package / "train.py").write_text(LOOPING)
    command = [
        sys.executable,
        "-m",
        "replicax",
        "plan",
        "--json",
        "-m",
        "trainer.train",
        "--topology",
        "cpu:2",
        "--fast",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["name"], facts["rows_per_replica"]) == ("step", 6)
    assert "arguments ['--fast']" in done.stderr


LOOPING = """
import sys
import replicax as rx
from .rows import BATCH

def step(x):
    return x.sum()

@rx.function
def epoch(iterator):
    for x in iterator:
        strategy.run(step, args=(x,))

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    strategy = rx.MirroredStrategy(["cpu:0"])
    epoch(iter(strategy.experimental_distribute_dataset([BATCH, BATCH])))
"""


def test_arguments_may_be_none_and_elements_dataclasses(tmp_path):
    source = """
import dataclasses
import numpy as np
import replicax as rx

@dataclasses.dataclass
class Batch:
    x: object

strategy = rx.MirroredStrategy(1)
dataset = strategy.experimental_distribute_dataset([Batch(np.ones((16, 4), np.float32))])

def step(batch, mask, scale=None):
    return (batch.x * 2).sum()

strategy.run(step, args=(next(iter(dataset)), None), kwargs={"scale": None})
"""
    done = plan(tmp_path, source, "--topology", "cpu:4")
    assert done.returncode == 0, done.stderr
    assert "a batch of 16 rows for each replica, 64 in all" in done.stdout


@pytest.mark.rest
def test_a_script_that_catches_everything(tmp_path):
    source = "import keras, numpy as np, replicax as rx\nstrategy = rx.MirroredStrategy()\ntry:"
    source += FIT.replace("\n", "\n    ") + "\nexcept:\n    print('went on')\n"
    done = plan(tmp_path, source, "--topology", "cpu:2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_replicas"] == 2
    assert "went on" in done.stderr


@pytest.mark.long
def test_a_script_without_a_program(tmp_path):
    done = plan(tmp_path, "print('nothing to do')", "--topology", "cpu:2")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended without a program" in done.stderr


WITHOUT_LIBTPU = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "libtpu" else found(name, *more)
"""


@pytest.mark.long
def test_missing_compiler_is_reported_before_the_script_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LIBTPU)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    done = plan(tmp_path, "print('begun', flush=True)", "--topology", "v5e:2x4")
    assert done.returncode == 1
    assert "the extra plan-tpu" in done.stderr
    assert "begun" not in done.stderr


@pytest.mark.long
def test_the_time_limit(tmp_path):
    done = plan(tmp_path, "import time; time.sleep(600)", "--topology", "cpu:2", "--limit", "2")
    assert done.returncode == 1
    assert "not finished after 2 s" in done.stderr


WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", flush=True)
if len(sys.argv) > 1:
    time.sleep(600)
import replicax as rx
print("not flushed")
rx.MirroredStrategy(["cpu:0"]).run(lambda: 1)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    "number", [None, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_nothing_is_left(tmp_path, number):
    """The script's output is not lost either, although its process skips Python's exit."""
    script = tmp_path / "train.py"
    script.write_text(WITH_A_CHILD)
    command = [
        sys.executable,
        "-m",
        "replicax",
        "plan",
        "--topology",
        "cpu:2",
        str(script),
        *(["wait"] if number else []),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    said = ""
    while "begun" not in said:
        said = running.stderr.readline()
        assert said, "the script has not begun"
    if number:
        running.send_signal(number)
    _, told = running.communicate(timeout=200)  # when all that may write has ended, the script's child too
    assert "Traceback" not in told
    if number is None:
        assert "not flushed" in told
    if number == signal.SIGINT:
        assert "it was interrupted" in told
        assert running.returncode == 130


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--topology", "v5p:16x16x17", "train.py"], "v5p:16x16x16"),
        (["--topology", "cpu:4", "missing.py"], "there is no file missing.py"),
        (["--topology", "cpu:4", "--global-batch", "0", "train.py"], "at least 1"),
        ([], "say which script"),
        (["--topology", "cpu:4"], "say which script"),
        (["train.py", "--", "--topology", "cpu:4"], "say which hardware: --topology v5p:16x16x16"),
        (["--topology", "cpu:4", "train.py", "--limit", "soon"], "--limit"),
        (["train.py", "--topology", "cpu:x"], "cpu:8"),
        (["--topology", "cpu:4", "-m"], "-m needs the name of a module"),
        (["--topology", "cpu:4", "--", "missing.py"], "there is no file missing.py"),
        (["--topology", "cpu:4", "."], "a package is run with -m"),
        (["--topology", "cpu:4", "--svg", "missing/x.svg", __file__], "there is no folder missing"),
        (["--topology", "cpu:4", __file__, "--svg", "."], "is a folder"),
    ],
)
def test_bad_input(options, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
