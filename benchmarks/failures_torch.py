"""One worker of torch in ``failures.py``, under ``torchrun --max-restarts``: DistributedDataParallel and checkpoints."""

import os

import torch

import failures_training as training
from failures_torch_network import layers, weights_of

PATH = training.folder() / "checkpoint.pt"


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    progress = training.Progress(rank)
    images, labels = map(torch.from_numpy, training.digits(training.folder()))
    torch.distributed.init_process_group("gloo")
    network = torch.nn.Sequential(*layers())
    wrapped = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(wrapped.parameters(), training.LEARNING_RATE)
    num_steps = 0
    if PATH.exists():
        saved = torch.load(PATH)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        num_steps = saved["num_steps"]
    while True:
        rows = torch.from_numpy(training.rows_of(num_steps, rank, len(images)))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        num_steps += 1
        if num_steps % training.save_every() == 0 and rank == 0:
            progress.write_weights(num_steps, weights_of(network))
            unfinished = PATH.with_suffix(".new")
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "num_steps": num_steps}, unfinished)
            os.replace(unfinished, PATH)
        progress.report(num_steps, num_steps * training.ROWS)


if __name__ == "__main__":
    main()
