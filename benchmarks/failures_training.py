"""The training that all contestants of ``failures.py`` do, and how a worker says how far it is; only numpy."""

import itertools
import os
import time
from pathlib import Path

import numpy as np

FOLDER, MODEL = "FAILURES_FOLDER", "FAILURES_MODEL"
NUM_WORKERS, ROWS, LEARNING_RATE = 3, 96, 0.001
SIZES = {"MLP": (64, 256, 256, 10), "4 MB of gradients": (64, 960, 960, 10)}
# Steps between two checkpoints, and between two copies of the weights for the comparison: some seconds.
SAVE_EVERY = {"MLP": 1000, "4 MB of gradients": 200}
REPORT_EVERY_S = 0.05
DATA = "digits.npz"


def folder() -> Path:
    return Path(os.environ[FOLDER])


def save_every() -> int:
    return SAVE_EVERY[os.environ[MODEL]]


def digits(where: Path) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits in one order. The parent wrote them: no worker waits for an import of scikit-learn."""
    with np.load(where / DATA) as file:
        return file["images"], file["labels"]


def initial_weights(model: str) -> list[np.ndarray]:
    """Kernels and biases in turn, float32, the same for all contestants."""
    rng = np.random.default_rng(0)
    weights = []
    sizes = SIZES[model]
    for rows, columns in itertools.pairwise(sizes):
        weights.append((rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)).astype(np.float32))
        weights.append(np.zeros(columns, np.float32))
    return weights


def rows_of(step: int, worker: int, num_examples: int) -> np.ndarray:
    """Indices of a worker's third of the batch of a step. Batches follow each other through the repeated data."""
    share = ROWS // NUM_WORKERS
    return (step * ROWS + worker * share + np.arange(share)) % num_examples


def mean_loss(weights: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    """The cross entropy over all examples, in float64."""
    hidden = images.astype(np.float64)
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        hidden = np.maximum(hidden @ kernel.astype(np.float64) + bias, 0)
    logits = hidden @ weights[-2].astype(np.float64) + weights[-1]
    logits -= logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]))


def weights_path(where: Path, step: int) -> Path:
    return where / f"weights-{step}.npz"


class Progress:
    """What a worker writes, at once, because it may be killed: ``progress-WORKER-PID`` has lines of the time, the
    number of steps of the training, and the number of rows that they trained on. The file is empty until the
    process has trained. ``weights-STEP.npz`` has the weights after a step."""

    def __init__(self, worker: int):
        self._file = open(folder() / f"progress-{worker}-{os.getpid()}", "w", buffering=1)  # noqa: SIM115
        self._next_at = 0.0

    def report(self, num_steps: int, num_rows: int) -> None:
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + REPORT_EVERY_S
            self._file.write(f"{now} {num_steps} {num_rows}\n")

    def write_weights(self, num_steps: int, weights: list[np.ndarray]) -> None:
        path = weights_path(folder(), num_steps)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb") as file:
            np.savez(file, *weights)
        os.replace(unfinished, path)
