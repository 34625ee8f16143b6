"""One worker of torch, with gloo, in ``multi_worker.py``; run with a Python that has torch."""

import datetime
import itertools

import torch

import fit_process
import peer_process
import worker_timing

LIMIT = datetime.timedelta(seconds=120)


def build(task, index, addresses, **task_options):
    """Answers the commands of the benchmark; see ``worker_replicax.py``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{addresses[0]}",
        rank=index,
        world_size=len(addresses),
        timeout=LIMIT,
    )
    return TASKS[task](**task_options)


def all_reduce():
    """One all-reduce, in place: the values double each time, up to infinity."""

    def make(size):
        value = torch.ones(size // 4)

        def once():
            torch.distributed.all_reduce(value)
            return value

        return once

    return worker_timing.of_sizes(make, lambda value: value.numpy(), torch.distributed.get_world_size())


def steps(model, rows):
    """One training step of a model in ``DistributedDataParallel``, on a fixed batch."""
    network = torch.nn.parallel.DistributedDataParallel(MODELS[model]())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loss_object = torch.nn.CrossEntropyLoss()
    share = rows // torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    features, labels = (torch.tensor(a[rank * share :][:share]) for a in fit_process.data(model, rows))
    features = features.movedim(-1, 1).contiguous() if features.ndim == 4 else features
    labels = labels.long()

    def once():
        optimizer.zero_grad()
        loss = loss_object(network(features), labels)
        loss.backward()
        optimizer.step()
        return loss

    return worker_timing.of_steps(once, float)


def dense(*sizes):
    """Dense layers with ReLU between them."""
    pairs = itertools.pairwise(sizes)
    layers = [layer for n, m in pairs for layer in (torch.nn.Linear(n, m), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1])


def cnn():
    """``fit_process.CNN``."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(800, fit_process.CLASSES),
    )


def digits():
    """``fit_process.DIGITS``."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 24, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(24),
        torch.nn.ReLU(),
        torch.nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(48),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(768, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, fit_process.CLASSES),
    )


MODELS = {name: lambda sizes=sizes: dense(*sizes) for name, sizes in fit_process.DENSE.items()}
MODELS |= {fit_process.CNN: cnn, fit_process.DIGITS: digits}
TASKS = {"all_reduce": all_reduce, "steps": steps}


if __name__ == "__main__":
    peer_process.answer(build)
