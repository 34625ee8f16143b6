"""One worker of torchft in ``failures.py``: a replica group of one process, after torchft's ``train_ddp.py``.

It differs from that program where the comparison needs it, or where torchft 0.2.0 gains by it:

- It packs the gradients, as a bucket of torch does, and sums them with ``Manager.allreduce``. The class
  ``torchft.DistributedDataParallel`` ends with an AssertionError (``assert fut._fut``) if another process dies while
  gloo sums: then a death ends the others too.
- By default a majority of the replica groups must be there (``min_replica_size``), as torchft's documentation advises: with 1, a
  replacement that is faster than the others trains from the beginning, alone.
- Rows follow from the number of the step: a replacement continues with the rows of the others' step, and a step that was
  not committed is tried again with the same rows. (``train_ddp.py`` has a sampler whose position nobody saves.)
- ``init_sync=False``, which the Manager's documentation advises where all begin with the same weights. At the first start
  all workers wait for each other, so that the first step is one of three.
- Addresses are those of this host's loopback. Time limits are arguments.
"""

import argparse
import functools
import os
import time
from datetime import timedelta

import torch
import torchft
import torchft.manager
from torchft.checkpointing.pg_transport import PGTransport

import failures_training as training
from failures_torch_network import layers, weights_of

GROUP, RESTARTS = "REPLICA_GROUP_ID", "TORCHELASTIC_RESTART_COUNT"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--min-replicas", type=int, required=True)
    parser.add_argument("--gloo-timeout", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    worker = int(os.environ[GROUP])
    progress = training.Progress(worker)
    images, labels = map(torch.from_numpy, training.digits(training.folder()))

    network = torch.nn.Sequential(*layers())
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=arguments.gloo_timeout))
    timeout = timedelta(seconds=arguments.timeout)

    def load(state):
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    torchft.manager.ManagerServer = functools.partial(on_loopback, torchft.manager.ManagerServer)
    manager = torchft.Manager(
        pg=group,
        min_replica_size=arguments.min_replicas,
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"digits_{worker}",
        timeout=timeout,
        hostname="127.0.0.1",
        checkpoint_transport=PGTransport(group, timeout=timeout, device="cpu"),
        init_sync=False,
    )
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(network.parameters(), training.LEARNING_RATE))
    if os.environ[RESTARTS] == "0":
        (training.folder() / f"ready-{worker}").touch()  # the manager sends heartbeats
        while len(list(training.folder().glob("ready-*"))) < training.NUM_WORKERS:
            time.sleep(0.01)
        time.sleep(1)

    share = training.ROWS // training.NUM_WORKERS
    while True:
        num_steps = manager.current_step()
        rows = torch.from_numpy(training.rows_of(num_steps, worker, len(images)))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images[rows]), labels[rows])
        loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        packed = torch.nn.utils.parameters_to_vector(gradients)
        manager.allreduce(packed).wait()  # the mean; an error makes the optimizer skip the step
        torch.nn.utils.vector_to_parameters(packed, gradients)
        optimizer.step()
        if manager.current_step() > num_steps:
            num_steps = manager.current_step()
            if num_steps % training.save_every() == 0 and manager.participating_rank() == 0:
                progress.write_weights(num_steps, weights_of(network))
            progress.report(num_steps, manager.batches_committed() * share)


def on_loopback(server, *, bind, **options):
    return server(bind=bind.replace("[::]", "127.0.0.1"), **options)


if __name__ == "__main__":
    main()
