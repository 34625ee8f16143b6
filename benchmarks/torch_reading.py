"""Reading a torch DataLoader; run by ``feeding.py`` with a Python that has torch."""

import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset

import peer_process


def build(features, rows, batch, shuffles):
    """A function that reads n batches."""
    torch.set_num_threads(2)
    data = TensorDataset(torch.zeros(rows, features), torch.zeros(rows, dtype=torch.int32))
    loader = DataLoader(data, batch_size=batch, shuffle=shuffles)
    iterator = itertools.chain.from_iterable(itertools.repeat(loader))

    def run(count):
        for _ in itertools.islice(iterator, count):
            pass

    return run


if __name__ == "__main__":
    peer_process.answer(build)
