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


class SynchronizedNorm(torch.nn.BatchNorm2d):
    """``torch.nn.SyncBatchNorm`` for CPUs, where torch has none, with as many exchanges: one in each direction."""

    def forward(self, x):
        return _Normalized.apply(x, self.weight, self.bias, self)


class _Normalized(torch.autograd.Function):
    """A normalized batch [N, C, H, W] of all processes."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm):
        count = x.numel() // x.shape[1] * torch.distributed.get_world_size()
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        torch.distributed.all_reduce(sums)
        mean, square = sums / count
        variance = square - mean.square()
        inverse = torch.rsqrt(variance + norm.eps)
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count = count
        scale = inverse * weight
        return torch.addcmul(_of_channels(bias - mean * scale), x, _of_channels(scale))

    @staticmethod
    def backward(ctx, gradient):
        x, weight, mean, inverse = ctx.saved_tensors
        normalized = (x - _of_channels(mean)) * _of_channels(inverse)
        of_bias, of_weight = gradient.sum((0, 2, 3)), (gradient * normalized).sum((0, 2, 3))
        sums = torch.stack([of_bias, of_weight])
        torch.distributed.all_reduce(sums)
        mean_of_bias, mean_of_weight = map(_of_channels, sums / ctx.count)
        of_x = (gradient - mean_of_bias - normalized * mean_of_weight) * _of_channels(inverse * weight)
        return of_x, of_weight, of_bias, None


def _of_channels(values):
    return values[:, None, None]


def steps(model, rows, synchronized=False):
    """One training step of a model in ``DistributedDataParallel``, on a fixed batch.

    With ``synchronized`` batches are normalized over all processes, as ``fit`` of replicax does.
    """
    made = MODELS[model]()
    if synchronized:
        for name, norm in [
            pair for pair in made.named_children() if isinstance(pair[1], torch.nn.BatchNorm2d)
        ]:
            setattr(made, name, SynchronizedNorm(norm.num_features))
    # (The moving statistics are equal already, and need not be sent before each step.)
    network = torch.nn.parallel.DistributedDataParallel(made, broadcast_buffers=not synchronized)
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
