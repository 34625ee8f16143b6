"""Every example runs as a person runs it: in a separate process, and its output is read."""

import ast
import importlib.util
import itertools
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags

ROOT = pathlib.Path(__file__).parents[2]
EPOCH = re.compile(r"epoch +(\d+)/(\d+)   train loss (\S+) accuracy (\S+)   test loss (\S+) accuracy (\S+)")

SAYS_DEVICES = ("KERAS_BACKEND", "TF_CONFIG", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")


def run(name: str, *options: str, timeout_s: float = 180, **environment: str) -> subprocess.CompletedProcess:
    """Runs an example without a number of devices in its environment."""
    inherited = {key: value for key, value in os.environ.items() if key not in SAYS_DEVICES}
    environment = {
        **inherited,
        "PYTHONPATH": path_of_programs(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(optimization_level=1),
        **environment,
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def output_of(name: str, *options: str, timeout_s: float = 180, **environment: str) -> str:
    done = run(name, *options, timeout_s=timeout_s, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def table_of(output: str) -> dict[str, str]:
    """The rows of the summary."""
    cells = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in cells}


# --- digits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_run() -> str:
    """The output of `make demo`, with everything that JAX and Keras import; other processes of tests skip some
    imports."""
    return output_of("digits.py", PYTHONPATH=str(ROOT / "src"))


@pytest.mark.rest
def test_demo_reaches_97_percent_on_images_that_it_has_not_seen(full_run):
    assert float(table_of(full_run)["test accuracy"]) >= 0.97


@pytest.mark.rest
def test_demo_prints_a_line_per_epoch_and_its_losses_fall(full_run):
    lines = [match.groups() for match in EPOCH.finditer(full_run)]
    assert [int(line[0]) for line in lines] == list(range(1, int(lines[0][1]) + 1))
    assert float(lines[-1][2]) < 0.1 * float(lines[0][2])
    assert float(lines[-1][4]) < float(lines[0][4])
    assert lines[-1][5] == table_of(full_run)["test accuracy"]


@pytest.mark.rest
def test_demo_runs_mirrored_on_two_virtual_devices(full_run):
    table = table_of(full_run)
    assert table["strategy"] == "MirroredStrategy"
    assert table["replicas"] == "2"
    assert table["devices"] == "cpu:0, cpu:1"
    assert float(table["steps/s"]) > 0


@pytest.mark.rest
def test_demo_shows_no_bar_where_there_is_no_terminal(full_run):
    assert "\x1b" not in full_run
    assert "━" not in full_run


# 1437 training and 360 test rows: with 64, the last batches have 29 and 40 rows, uneven over 3 replicas.
@pytest.mark.parametrize(
    ("options", "strategy", "replicas"),
    [
        pytest.param(
            ("--strategy", "one_device", "--batch-size", "64"),
            "OneDeviceStrategy",
            "1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--strategy", "mirrored", "--devices", "3", "--batch-size", "64"),
            "MirroredStrategy",
            "3",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--strategy", "central_storage"), "CentralStorageStrategy", "2", marks=pytest.mark.long
        ),
        pytest.param(("--devices", "1"), "OneDeviceStrategy", "1", marks=pytest.mark.long),
    ],
)
def test_digits_trains_with_each_strategy(options, strategy, replicas):
    output = output_of("digits.py", "--epochs", "1", *options)
    table = table_of(output)
    assert (table["strategy"], table["replicas"]) == (strategy, replicas)
    (line,) = EPOCH.finditer(output)
    assert float(line[3]) < 1.5
    assert float(line[6]) > 0.7


@pytest.mark.rest
def test_evaluation_counts_every_row_once(full_run):
    """Accuracies are whole numbers of 1437 and 360 rows; with batches of 32 the last ones have 29 and 8."""
    for match in EPOCH.finditer(full_run):
        for accuracy, num_rows in ((match[4], 1437), (match[6], 360)):
            count = float(accuracy) * num_rows
            assert abs(count - round(count)) <= 0.5e-4 * num_rows + 1e-9


@pytest.fixture(scope="module")
def digits():
    """The example as a module: importing it runs nothing."""
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--devices", "0"), ["--devices", "at least 1", "got 0"]),
        (("--devices", "two"), ["--devices", "'two' is not a whole number"]),
        (("--epochs", "0"), ["--epochs", "at least 1"]),
        (("--batch-size", "-3"), ["--batch-size", "at least 1", "got -3"]),
        (("--seed", "-1"), ["--seed", "at least 0"]),
        (("--seed", "4294967296"), ["--seed", "at most 4294967295"]),
        (("--strategy", "many"), ["'many'", "one_device", "mirrored", "central_storage"]),
        (("--strategy", "one_device", "--devices", "4"), ["one_device", "1 device", "4"]),
    ],
)
def test_digits_explains_options_that_it_cannot_use(digits, monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["digits.py", *options])
    with pytest.raises(SystemExit) as ended:
        digits.parse_options()
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
            ["ParameterServerStrategy", "not in this version", "--strategy mirrored"],
        ),
        ("{worker", ["TF_CONFIG is not JSON", "{"]),
        ("[1]", ["TF_CONFIG", "[1]"]),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', ["TF_CONFIG", "task"]),
    ],
)
def test_digits_explains_a_cluster_that_it_cannot_use(digits, monkeypatch, capsys, cluster, words):
    monkeypatch.setattr(sys, "argv", ["digits.py"])
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(SystemExit) as ended:
        digits.parse_options()
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ((), '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'),
        (
            ("--strategy", "mirrored"),
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}',
        ),
    ],
)
def test_digits_takes_a_cluster_of_one_or_a_strategy_by_name(digits, monkeypatch, options, cluster):
    monkeypatch.setattr(sys, "argv", ["digits.py", *options])
    monkeypatch.setenv("TF_CONFIG", cluster)
    digits.parse_options()


@pytest.mark.long  # test_cluster.py trains the same on two workers, started by others
def test_digits_on_two_workers_is_as_on_two_devices():
    """The same program, started by `replicax launch`; the chief prints."""
    options = ("--epochs", "2", "--batch-size", "64")
    expected = [match.groups() for match in EPOCH.finditer(output_of("digits.py", *options))]
    environment = {key: value for key, value in os.environ.items() if key not in SAYS_DEVICES}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "replicax",
            "launch",
            "--workers",
            "2",
            str(ROOT / "examples" / "digits.py"),
            *options,
        ],
        env={**environment, "PYTHONPATH": path_of_programs(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MultiWorkerMirroredStrategy" in done.stdout
    lines = [line for line in done.stdout.splitlines() if EPOCH.search(line)]
    assert all(line.startswith("worker 0 | ") for line in lines)
    got = [EPOCH.search(line).groups() for line in lines]
    assert [line[:2] for line in got] == [line[:2] for line in expected] == [("1", "2"), ("2", "2")]
    for line, wanted in zip(got, expected, strict=True):
        # Four decimals are printed. Seeds, batch normalisation and dropout are those of replicas 0 and 1 in both.
        for value, other in zip(line[2:], wanted[2:], strict=True):
            assert float(value) == pytest.approx(float(other), abs=2e-3)


def test_digits_explains_another_keras_backend():
    done = run("digits.py", KERAS_BACKEND="torch")
    assert done.returncode == 1
    assert done.stderr.startswith("KERAS_BACKEND is 'torch'; replicax needs 'jax'.")


# --- the others ---------------------------------------------------------------------------------------


def test_guide_prints_the_loss_of_100_steps_and_of_10_more():
    losses = [float(line) for line in output_of("guide.py").splitlines()]
    assert len(losses) == 110  # 1000 rows in batches of 10, then 10 steps by the iterator
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.rest
def test_functional_jax_learns_and_ends_with_one_state():
    lines = output_of("functional_jax.py").splitlines()
    errors = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
    assert errors[-1] < 0.05 * errors[0]
    assert "13 of 13 arrays of the state are proven the same" in lines
    assert float(lines[-1].split()[-1]) < 0.01


@pytest.mark.rest
def test_plan_ahead_plans_for_this_machine_at_least():
    lines = output_of("plan_ahead.py").splitlines()
    assert lines[0].startswith("cpu:8: 4,096 rows, ")
    assert "8.25e+11 FLOP" in lines[0]  # 48 layers: forward, again, and two products backward
    assert [line.split(":")[0] for line in lines[1:4]] == ["v5e", "v5p", "h100"]
    assert "  1 × all-reduce  384.0 MiB  groups of 8  a device sends 672.0 MiB" in lines


# --- fit ----------------------------------------------------------------------------------------------

FIT_EPOCH = re.compile(
    r"^\d+/\d+ - .* - accuracy: (\S+) - loss: (\S+) - val_accuracy: (\S+) - val_loss: (\S+)", re.M
)


def fit_output(*options: str) -> tuple[str, list[tuple[str, ...]]]:
    """The output of ``keras_fit.py``, and the values of Keras's line of each epoch."""
    output = output_of("keras_fit.py", *options)
    return output, FIT_EPOCH.findall(output)


@pytest.mark.rest
def test_keras_fit_learns_on_two_devices_and_saves_its_curve(tmp_path):
    curve = tmp_path / "curve.png"
    output, epochs = fit_output("--curve", str(curve))
    assert output.startswith("2 replica(s) of MirroredStrategy\n")
    assert len(epochs) == 10
    assert float(epochs[-1][1]) < 0.1 * float(epochs[0][1])
    accuracy, num_wrong = re.search(r"test accuracy (\S+), (\d+) of 360 wrong", output).groups()
    assert float(accuracy) >= 0.97
    assert float(accuracy) == pytest.approx(1 - int(num_wrong) / 360, abs=1e-4)  # evaluate and predict agree
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert curve.stat().st_size > 10_000


# 1149 rows to train with: batches of 50 leave a last one of 49, uneven over 2 and 3 replicas.
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        (("--strategy", "one_device"), "1 replica(s) of OneDeviceStrategy"),
        (("--strategy", "mirrored", "--devices", "3"), "3 replica(s) of MirroredStrategy"),
        (("--strategy", "central_storage"), "2 replica(s) of CentralStorageStrategy"),
    ],
)
def test_keras_fit_equals_plain_keras_under_each_strategy(options, first_line, plain_fit):
    output, (epoch,) = fit_output("--epochs", "1", "--batch-size", "50", *options)
    assert output.splitlines()[0] == first_line
    assert [float(number) for number in epoch] == pytest.approx(plain_fit, abs=2e-3)


@pytest.fixture(scope="module")
def plain_fit() -> list[float]:
    """An epoch under the default strategy, which does not change Keras."""
    output, (epoch,) = fit_output("--strategy", "default", "--epochs", "1", "--batch-size", "50")
    assert output.startswith("1 replica(s) of DefaultStrategy\n")
    return [float(number) for number in epoch]


@pytest.mark.timeout(250)
@pytest.mark.rest
def test_parameter_server_fit_learns_on_a_worker_and_a_parameter_server():
    output = output_of("parameter_server_fit.py", "--workers", "1", "--ps", "1", "--epochs", "5")
    assert [float(epoch[1]) for epoch in FIT_EPOCH.findall(output)][-1] < 0.5
    steps, accuracy, wrong = re.search(
        r"(\d+) steps\ntest accuracy (\S+), (\d+) of 360 wrong", output
    ).groups()
    assert int(steps) == 5 * 36
    assert float(accuracy) > 0.88
    assert float(accuracy) == pytest.approx(1 - int(wrong) / 360, abs=1e-4)  # evaluate and predict agree


# The listings of `Model.fit` in TensorFlow's guide.
GUIDE_FIT = """
mirrored_strategy = tf.distribute.MirroredStrategy()
with mirrored_strategy.scope():
  model = tf.keras.Sequential([
      tf.keras.layers.Dense(1, input_shape=(1,),
                            kernel_regularizer=tf.keras.regularizers.L2(1e-4))])
  model.compile(loss='mse', optimizer='sgd')

dataset = tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100).batch(10)
model.fit(dataset, epochs=2)
model.evaluate(dataset)

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10)

BATCH_SIZE_PER_REPLICA = 5
global_batch_size = (BATCH_SIZE_PER_REPLICA *
                     mirrored_strategy.num_replicas_in_sync)
dataset = tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100)
dataset = dataset.batch(global_batch_size)
LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 20:0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]
"""
RENAMED = {
    "tf.distribute.": "rx.",
    "tf.keras.": "keras.",
    "tf.data.Dataset.from_tensors(([1.], [1.]))": "rx.data.from_arrays((np.ones((1, 1)), np.ones((1, 1))))",
}


def test_guide_fit_is_the_guides_listing_with_its_names_changed():
    listing = GUIDE_FIT
    for old, new in RENAMED.items():
        listing = listing.replace(old, new)
    source = (ROOT / "examples" / "guide_fit.py").read_text()
    ours = [ast.unparse(statement) for statement in ast.parse(source).body]
    guides = [ast.unparse(statement) for statement in ast.parse(listing).body]
    assert ours[-len(guides) :] == guides


@pytest.mark.rest
def test_guide_fit_fits_and_evaluates():
    """The final values of each bar: of two epochs, of the evaluation, of two epochs."""
    found = re.findall(r"10/10.* loss: ([\d.e+-]+)", output_of("guide_fit.py"))
    losses = [
        float(loss) for loss, _ in itertools.groupby(found)
    ]  # a bar may come to its end before it is ended
    assert len(losses) == 5
    assert all(later <= earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < losses[0]


@pytest.mark.rest
def test_custom_train_step_reaches_the_same_losses_in_both_styles():
    lines = output_of("custom_train_step.py").splitlines()
    losses = [[float(number) for number in line.split()[1:]] for line in lines[1:-1]]
    assert len(losses) == 5
    for (earlier, _), (later, other) in itertools.pairwise(losses):
        assert later < earlier
        assert later == pytest.approx(other, rel=1e-4)
    assert lines[-1] == "the same losses: True"


# --- nnx ----------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_nnx_model_learns():
    lines = output_of("nnx_model.py").splitlines()
    assert lines[0].startswith("2 replicas of <MirroredStrategy")
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in lines[1:]]
    recognised = [int(re.search(r"(\d+) of 360", line)[1]) for line in lines[1:]]
    assert losses[-1] < 0.2 * losses[0]
    assert recognised[-1] > 340


# --- parameter servers --------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.rest
def test_every_worker_runs_the_program_and_all_train_one_model():
    inherited = {key: value for key, value in os.environ.items() if key not in SAYS_DEVICES}
    script = ROOT / "examples" / "parameter_server_every_worker.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "replicax",
            "launch",
            "--workers",
            "2",
            "--ps",
            "1",
            "--no-chief",
            str(script),
        ],
        env={**inherited, "PYTHONPATH": path_of_programs(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    own = [int(number) for number in re.findall(r"worker \d made (\d+) steps", done.stdout)]
    (total,) = re.findall(r"after (\d+) steps of all workers", done.stdout)
    assert len(own) == 2
    # The chief may print before the other's last step.
    assert int(total) <= sum(own) <= int(total) + 1
    assert 400 <= int(total) <= 401
    (weights,) = re.findall(r"the weights are \[(.*)\]", done.stdout)
    assert [round(float(weight), 2) for weight in weights.split()] == [2.0, -1.0, 0.5]


# --- preemption -----------------------------------------------------------------------------------------


@pytest.mark.long  # tests/faults/test_preemption.py sends signals at random
@pytest.mark.timeout(400)
def test_preemption_changes_nothing_in_the_end(tmp_path):
    ends = []
    for folder, options in (("alone", []), ("told", ["--preempt-at", "25,40"])):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "replicax",
                "launch",
                "--plain",
                "--workers",
                "2",
                "--devices-per-worker",
                "1",
            ]
            + [
                "--checkpoint-dir",
                str(tmp_path / folder),
                str(ROOT / "examples" / "preemption.py"),
                *options,
            ],
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ends.append(re.findall(r"worker \d \| (loss .*, weights .*)", done.stdout))
        begins = re.findall(r"worker 1 \| begins at step (\d+)", done.stdout)
        assert len(begins) == (3 if options else 1)
    assert len(set(ends[0] + ends[1])) == 1
    assert len(ends[0]) == len(ends[1]) == 2


# --- TPUs -----------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_model_parallelism_on_virtual_tpus():
    printed = output_of("tpu_model_parallel.py")
    assert printed.startswith("4 replicas of 2 devices")
    losses = [float(loss) for loss in re.findall(r"epoch \d+   loss (\S+)", printed)]
    assert losses[-1] < 0.1 * losses[0]
    assert "a device holds 51.0% of the state" in printed


@pytest.mark.long
def test_tensor_parallelism_by_a_layout_map():
    printed = output_of("tensor_parallel.py")
    assert printed.startswith("4 replicas of 2 devices")
    of_fit, of_run = (float(loss) for loss in re.findall(r"train_with_\w+: a mean loss of (\S+)", printed))
    assert of_run == pytest.approx(of_fit, rel=1e-4)
    assert of_fit < 0.99 * math.log(13)  # of guessing
    pieces = re.findall(r"(block_0/\S+) +\(([\d, ]+)\) +a device has \(([\d, ]+)\)", printed)
    assert len(pieces) == 10
    assert ("block_0/narrow/kernel", "128, 32", "64, 32") in pieces
    over = set(re.findall(r"all-reduce of [\d,]+ bytes over (\S+)", printed))
    assert {"replica", "logical"} <= over


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_a_small_gpt_resumes_on_other_replicas_with_the_same_losses():
    printed = output_of("small_gpt.py", timeout_s=280)
    rows = re.findall(r"^ +(\d) (.*)$", printed, re.MULTILINE)
    assert [number for number, _ in rows] == ["1", "2", "3", "4"]
    losses = [[float(loss) for loss in row.split()] for _, row in rows]
    whole = [row[0] for row in losses]
    assert whole == sorted(whole, reverse=True)
    assert whole[-1] < 0.8 * whole[0]
    # Two epochs ran before the kill, and two after it.
    assert [len(row) for row in losses] == [2] * 4
    for one, other in losses:
        assert one == pytest.approx(other, rel=1e-4)
    held = re.findall(r"a device holds ([\d,]+) of [\d,]+ bytes of state; an eighth is ([\d,]+)", printed)
    assert len(held) == 2
    for ours, even in held:
        assert int(ours.replace(",", "")) < 1.06 * int(even.replace(",", ""))
    missing = [name for name in ("jax_cuda12_plugin", "libtpu") if importlib.util.find_spec(name) is None]
    assert printed.count("no plan for") == len(missing)


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.rest
def test_checkpoints_resume_with_another_number_of_devices(tmp_path):
    options = "--directory", str(tmp_path / "training")
    first = output_of("checkpoints.py", "--epochs", "1", *options).splitlines()
    second = output_of("checkpoints.py", "--epochs", "3", "--devices", "3", *options).splitlines()
    assert [first[0], second[0]] == ["begins anew", "restored ckpt-1"]
    losses = [float(line.split()[3]) for line in (*first, *second) if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert second[-1] == "kept ckpt-2, ckpt-3"
