"""``replicax launch``: --workers auto, --log-dir, and the check of Keras's backend before anything starts."""

import json
import subprocess
import sys

import pytest

from replicax.__main__ import main
from replicax._launch import launch
from replicax._launch.script_keras import script_path, use_of_keras

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import json, os\nprint(os.environ['TF_CONFIG'])\n")
    return str(path)


def run(capfd, *arguments, code=0):
    ended = main(["launch", "--plain", *arguments])
    out, err = capfd.readouterr()
    assert ended == code, err
    return out, err


def test_auto_is_one_worker_for_each_core(script, capfd, monkeypatch):
    monkeypatch.setattr(launch, "gpus_here", lambda environ: [])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    out, err = run(capfd, "--workers", "auto", "--devices-per-worker", "2", script)
    assert "--workers auto: 2 worker(s); there are 4 CPU core(s)." in err
    cluster = json.loads(out.splitlines()[0].partition("| ")[2])["cluster"]
    assert len(cluster["worker"]) == 2


def test_auto_is_one_worker_for_each_gpu(monkeypatch):
    parser = launch.argparse.ArgumentParser()
    options = launch.argparse.Namespace(
        workers="auto", chief=None, ps=0, evaluator=True, devices_per_worker=None, gpus_per_worker=2
    )
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(launch, "gpus_here", lambda environ: list("01234567"))
    launch._choose_num_workers(options, parser)
    assert (options.workers, options.gpus_per_worker) == (3, 2)  # the evaluator has two GPUs
    options.workers, options.gpus_per_worker = "auto", 8
    with pytest.raises(SystemExit):
        launch._choose_num_workers(options, parser)


def test_each_task_has_a_log(script, capfd, tmp_path):
    logs = tmp_path / "made" / "logs"
    for _ in range(2):
        out, _ = run(capfd, "--workers", "2", "--log-dir", str(logs), script)
        assert len(out.splitlines()) == 2
    for number in range(2):
        lines = (logs / f"worker-{number}.log").read_text().splitlines()
        assert [line.startswith(f"--- worker {number}, start 1, ") for line in lines] == [True, False] * 2
        assert json.loads(lines[1])["task"] == {"type": "worker", "index": number}


def test_routine_output_of_libraries_is_hidden(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(
        "print('[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1')\n"
        "print('W1123 13:04:20.033250 2973 coordination_service.cc:185] [29] Using experimental recoverable task feature. The')\n"
        "print('[Gloo] something else')\n"
        "raise SystemExit(3)\n"
    )
    out, err = run(capfd, str(path), code=3)
    assert out == "worker 0 | [Gloo] something else\n"
    assert "Its last lines:\n    [Gloo] something else\n" in err


SCRIPTS = {
    "import replicax as rx\nimport keras\n": (2, True),
    "import keras\nfrom replicax import MirroredStrategy\n": (1, True),
    "import settings\nfrom keras import layers\nimport replicax\n": (2, False),
    "import keras\n": None,  # it does not use replicax
    "import replicax\n": None,
    "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras, replicax\n": None,
    "import replicax\ndef f():\n  import keras\n": None,
    "import (": None,
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_imports_of_a_script(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    use = use_of_keras(tmp_path / "train.py")
    assert (use and (use.line, use.is_certain)) == SCRIPTS[text]


def test_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "__main__.py").touch()
    (package / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert script_path(["-m", "mine.train"]) == package / "train.py"
    assert script_path(["-m", "mine"]) == package / "__main__.py"
    assert script_path(["-m", "nothing.there"]) is None


def test_a_script_whose_keras_would_not_run_on_jax_is_not_started(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    path = tmp_path / "train.py"
    path.write_text("print('started')\nimport replicax\nimport keras\n")
    with pytest.raises(SystemExit) as end:
        main(["launch", str(path)])
    assert end.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"{path}, line 3, imports Keras. Keras would run on the 'tensorflow' backend" in err
    assert 'Write import os; os.environ["KERAS_BACKEND"] = "jax" above' in err


def test_a_plan_without_its_compiler_starts_no_script(script, capfd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", script, "--topology", "v5e:2x4"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(
        "replicax plan: A plan for v5e:2x4 needs libtpu, which is not installed. Run: pip install libtpu"
    )


@pytest.mark.rest
def test_the_doctors_test_runs_in_all_processes():
    command = [
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
    done = subprocess.run(
        [*command, "-m", "replicax", "doctor", "--test"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 (cpu) in 2 process(es)") == 2
    assert done.stdout.count("the numbers are right") == 2
