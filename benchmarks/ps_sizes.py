"""The models of ``parameter_server.py``, the same for all contestants. NumPy only."""

from __future__ import annotations

import numpy as np

NUM_WORKERS = 2
LIMIT_S = 120.0

MLP, ROWS, RATE = (784, 256, 10), 64, 0.01
LARGE = 16 * 2**20  # elements of 4 bytes: 64 MB
TABLE, NUM_IDS, NUM_BATCHES = (1_000_000, 32), 4096, 64


def mlp() -> tuple[list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Initial values of weights and biases, and one batch."""
    rng = np.random.default_rng(0)
    inputs, hidden, outputs = MLP
    weights = [_normal(rng, inputs, hidden), np.zeros(hidden, np.float32)]
    weights += [_normal(rng, hidden, outputs), np.zeros(outputs, np.float32)]
    labels = rng.integers(0, outputs, ROWS).astype(np.int32)
    return weights, (_normal(rng, ROWS, inputs), labels)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape, scale=0.05).astype(np.float32)


def ids() -> np.ndarray:
    """int32 [NUM_BATCHES, NUM_IDS], uniform."""
    return np.random.default_rng(0).integers(0, TABLE[0], (NUM_BATCHES, NUM_IDS)).astype(np.int32)
