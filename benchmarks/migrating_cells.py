"""Runs the cells of one notebook or script with small synthetic data; ``migrating.py`` runs it in a separate
process.

The stand-ins are outside the cells, and are the same for TensorFlow and for the migrated program: data sets
(``keras.datasets``, ``tensorflow_datasets``), initial weights that depend only on the shape, no dropout, no
shuffling. ``fit`` and ``evaluate`` print their results, so that the numbers of both programs can be compared.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.abc
import importlib.util
import io
import json
import linecache
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

ROWS = {"train": 512, "test": 128}
SHAPES = {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3)}
CELL_LIMIT_S = 90


def images(split: str, shape: tuple[int, ...] = (28, 28)) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [rows, *shape] of ten classes, each a different pattern with noise, and their labels."""
    patterns = np.random.default_rng(0).integers(0, 160, (10, *shape))
    generator = np.random.default_rng(len(split))
    labels = np.arange(ROWS[split]) % 10
    noise = generator.integers(0, 96, (len(labels), *shape))
    return (patterns[labels] + noise).astype(np.uint8), labels.astype(np.uint8)


def loader(shape: tuple[int, ...]) -> Callable:
    """Replaces ``load_data`` of a module of ``keras.datasets``."""
    return lambda *_args, **_options: (images("train", shape), images("test", shape))


def tensorflow_datasets() -> types.ModuleType:
    """A module whose ``load`` returns TensorFlow datasets of synthetic images."""
    module = types.ModuleType("tensorflow_datasets")

    def load(name, split=None, as_supervised=False, with_info=False, **_options):
        import tensorflow as tf

        def dataset(part):
            pixels, labels = images("test" if "test" in part else "train", (28, 28, 1))
            rows = (pixels, labels.astype(np.int64))
            return tf.data.Dataset.from_tensor_slices(
                rows if as_supervised else dict(zip(("image", "label"), rows))
            )

        if split is None:
            datasets = {part: dataset(part) for part in ROWS}
        else:
            datasets = [dataset(part) for part in split] if isinstance(split, list) else dataset(split)
        splits = {part: types.SimpleNamespace(num_examples=rows) for part, rows in ROWS.items()}
        return (datasets, types.SimpleNamespace(splits=splits)) if with_info else datasets

    module.load = load
    module.disable_progress_bar = lambda: None
    module.__spec__ = importlib.util.spec_from_loader("tensorflow_datasets", None)
    return module


def patch_keras(keras: types.ModuleType) -> None:
    """Stand-ins in Keras 3 or tf_keras."""
    legacy = keras.__name__ == "tf_keras"

    def draw(self, shape, dtype=None, **_options):
        shape = tuple(int(size) for size in shape)
        values = np.random.default_rng(zlib.crc32(repr(shape).encode())).standard_normal(shape)
        values = (values / np.sqrt(max(1, np.prod(shape[:-1])))).astype(np.float32)
        if legacy:
            import tensorflow as tf

            return tf.constant(values, dtype or tf.float32)
        return keras.ops.convert_to_tensor(values, dtype or "float32")

    for name in ("VarianceScaling", "RandomNormal", "RandomUniform", "TruncatedNormal", "Orthogonal"):
        getattr(keras.initializers, name).__call__ = draw
    keras.layers.Dropout.call = lambda self, inputs, *_args, **_options: inputs
    for name, shape in SHAPES.items():
        getattr(keras.datasets, name).load_data = loader(shape)

    model = keras.Model
    fit, evaluate = model.fit, model.evaluate

    @functools.wraps(fit)
    def reporting_fit(self, *args, **options):
        history = fit(self, *args, **{"shuffle": False, **options, "verbose": 0})
        named = {
            "learning_rate" if name == "lr" else name: values for name, values in history.history.items()
        }
        print("fit:", {name: [float(v) for v in named[name]] for name in sorted(named)})
        return history

    @functools.wraps(evaluate)
    def reporting_evaluate(self, *args, **options):
        result = evaluate(self, *args, **{**options, "verbose": 0})
        if not options.get("_use_cached_eval_dataset"):
            by_name = isinstance(result, dict)
            names = sorted(result, key=lambda name: (name != "loss", name)) if by_name else ()
            numbers = [result[name] for name in names] if by_name else np.ravel(result)
            print("evaluate:", [float(number) for number in numbers])
        return result

    model.fit, model.evaluate = reporting_fit, reporting_evaluate


def patch_tensorflow(tf: types.ModuleType) -> None:
    """Keeps datasets in order, and makes two devices."""
    tf.data.Dataset.shuffle = lambda self, *_args, **_options: self
    if os.environ.get("TF_USE_LEGACY_KERAS"):  # tf.keras.datasets holds copies of tf_keras.datasets
        for name, shape in SHAPES.items():
            getattr(tf.keras.datasets, name).load_data = loader(shape)
    if os.environ.get("MIGRATING_DEVICES"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        num_devices = int(os.environ["MIGRATING_DEVICES"])
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
        )


class Patches(importlib.abc.MetaPathFinder):
    """Patches modules as soon as they are imported."""

    patches: ClassVar = {"keras": patch_keras, "tf_keras": patch_keras, "tensorflow": patch_tensorflow}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.patches:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute, patch = spec.loader.exec_module, self.patches[fullname]

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


class Shell:
    """Runs lines that begin with ``!`` and ``%`` as IPython does."""

    def __init__(self, directory: Path):
        self.background: list[subprocess.Popen] = []
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        python = programs / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} --script "$@"\n')
        python.chmod(0o755)
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, command: str, waits: bool = True) -> None:
        process = subprocess.Popen(
            ["bash", "-c", command],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if not waits:
            self.background.append(process)
            return
        try:
            print(process.communicate(timeout=CELL_LIMIT_S)[0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise

    def magic(self, line: str, names: dict) -> None:
        command, _, rest = line.partition(" ")
        if command == "%killbgscripts":
            self.close()
        elif command in ("!ls", "%ls"):
            self.run("ls " + re.sub(r"\{([^}]*)\}", lambda match: str(eval(match[1], names)), rest))

    def close(self) -> None:
        for process in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.background.clear()


def execute(source: str, names: dict, shell: Shell, title: str) -> None:
    """Runs one cell."""
    if source.startswith("%%writefile"):
        first, _, body = source.partition("\n")
        Path(first.split()[1]).write_text(body)
    elif source.startswith("%%bash"):
        first, _, body = source.partition("\n")
        shell.run(body, waits="--bg" not in first)
    else:
        source = re.sub(r"^(\s*)([!%]\w.*)$", r"\1__magic__(\2)", source, flags=re.M)
        source = re.sub(r"__magic__\((.*)\)$", lambda match: f"__magic__({match[1]!r})", source, flags=re.M)
        names["__magic__"] = lambda line: shell.magic(line, names)
        linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)  # for AutoGraph
        for statement in ast.parse(
            source
        ).body:  # one by one, as IPython does: `from __future__` may follow a magic
            exec(compile(ast.Module([statement], []), title, "exec"), names)


def run_notebook(notebook: Path, record: Path) -> None:
    """Runs all cells in order; a cell that fails does not stop the later ones."""
    sys.path.insert(0, os.getcwd())
    shell = Shell(Path.cwd())
    names: dict = {"__name__": "__main__", "__builtins__": builtins}
    np.random.seed(0)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]

    def out_of_time(*_args):
        raise TimeoutError(f"The cell takes more than {CELL_LIMIT_S} s.")

    signal.signal(signal.SIGALRM, out_of_time)
    try:
        for index, cell in enumerate(cells):
            output, error, start = io.StringIO(), None, time.perf_counter()
            signal.alarm(CELL_LIMIT_S)
            with contextlib.redirect_stdout(output):
                try:
                    execute("".join(cell["source"]), names, shell, f"<{notebook.stem}, cell {index}>")
                except BaseException as exception:
                    error = f"{type(exception).__name__}: {exception}\n{''.join(traceback.format_exception(exception, limit=-8))}"
                finally:
                    signal.alarm(0)
            entry = {
                "cell": index,
                "error": error,
                "output": output.getvalue(),
                "s": round(time.perf_counter() - start, 2),
            }
            with record.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    finally:
        shell.close()


def run_script(path: str) -> None:
    """Runs a file that a cell has written, and records an error if it fails; the cell then counts as not run."""
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        entry = {"script": Path(path).name, "error": f"{type(error).__name__}: {error}"}
        with open(os.environ["MIGRATING_SCRIPTS"], "a") as file:
            file.write(json.dumps(entry) + "\n")
        raise


def main() -> None:
    sys.meta_path.insert(0, Patches())
    sys.modules["tensorflow_datasets"] = tensorflow_datasets()
    if sys.argv[1] == "--script":
        sys.argv = sys.argv[2:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        run_script(sys.argv[0])
    else:
        run_notebook(Path(sys.argv[1]), Path(sys.argv[2]))
        os._exit(0)  # servers and background threads of a page do not outlive it


if __name__ == "__main__":
    main()
