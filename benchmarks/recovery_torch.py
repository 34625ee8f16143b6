"""One worker of torch in ``recovery.py``, under ``torchrun``; run with a Python that has torch."""

import functools
import itertools
import os

import recovery_marks

mark = functools.partial(
    recovery_marks.mark, rank=int(os.environ["RANK"]), attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"])
)
mark("python")
import torch

mark("imports")
PATH = os.path.join(os.environ[recovery_marks.FOLDER], "checkpoint.pt")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    mark("join")
    layers = []
    for size, following in itertools.pairwise(recovery_marks.SIZES):
        layers += [torch.nn.Linear(size, following, bias=False), torch.nn.ReLU()]
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    if os.path.exists(PATH):
        saved = torch.load(PATH)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
    mark("restore")
    features = torch.randn(recovery_marks.ROWS // 2, recovery_marks.SIZES[0])
    for number in itertools.count():
        optimizer.zero_grad()
        loss = ((network(features) - features[:, : recovery_marks.SIZES[-1]]) ** 2).mean()
        loss.backward()
        optimizer.step()
        float(loss)
        if number in (0, recovery_marks.READY_AT):
            mark("first step" if not number else recovery_marks.READY)
        if number % recovery_marks.SAVE_EVERY == 0 and torch.distributed.get_rank() == 0:
            torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, PATH + ".new")
            os.replace(PATH + ".new", PATH)


if __name__ == "__main__":
    main()
