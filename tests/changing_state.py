"""A state whose every value tells the step, and a program that saves it again and again; several tests kill it."""

import numpy as np

SHAPES = {"rows": (960, 1024), "columns": (96, 960), "copied": (300, 700), "scalar": ()}
DIVIDED = {"rows": ("x",), "columns": (None, "x")}


def values_of(step):
    """The values of a step; no element is the same in two steps."""
    return {
        name: (np.arange(np.prod(shape, dtype=int), dtype=np.int32) * 7 + 10_000 * step + number).reshape(
            shape
        )
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def differing(state, step):
    """The names of the values that are not those of a step. Of arrays on several processes it looks at the own part."""
    wrong = [] if state["step"] == step else ["step"]
    for name, expected in values_of(step).items():
        shards = getattr(state[name], "addressable_shards", None)
        parts = (
            [((), np.asarray(state[name]))]
            if shards is None
            else [(one.index, np.asarray(one.data)) for one in shards]
        )
        if not all(np.array_equal(part, expected[index]) for index, part in parts):
            wrong.append(name)
    return wrong


def placed(step):
    """The state of a step on the devices of all processes: rows and columns divided, the others copied."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    state = {"step": step}
    for name, value in values_of(step).items():
        sharding = NamedSharding(mesh, PartitionSpec(*DIVIDED.get(name, ())))
        state[name] = jax.make_array_from_callback(
            value.shape, sharding, lambda index, value=value: value[index]
        )
    return state


def dies_at(moment, at_save):
    """Makes this process kill itself at a moment of one of its saves."""
    import os
    import shutil
    import signal
    import time

    from replicax._src.checkpoint import writing
    from replicax.testing import report

    num_saves = 0
    write_pieces, take_place, failing_as, rmtree = (
        writing.write_pieces,
        writing._take_place,
        writing._failing_as,
        shutil.rmtree,
    )

    def die_at(here):
        if here == moment and num_saves >= at_save:
            report(killed_at=time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    def write(part, arrays, pieces):
        nonlocal num_saves
        num_saves += 1
        pieces = list(pieces)
        die_at("made")
        written = write_pieces(part, arrays, pieces[: len(pieces) // 2])
        die_at("half")
        for folder, files in write_pieces(part, arrays, pieces[len(pieces) // 2 :]).items():
            written.setdefault(folder, []).extend(files)
        die_at("written")
        return written

    def failing(path, action):
        if action.__name__ == "commit":
            die_at("agreed")
        return failing_as(path, action)

    def take(part, path):
        die_at("named")
        take_place(part, path)
        die_at("renamed")

    def remove(path, **how):
        if os.path.exists(path) and ".part-" in str(path):
            die_at("removing")
        rmtree(path, **how)

    writing.write_pieces, writing._take_place, writing._failing_as = write, take, failing
    shutil.rmtree = remove


def saving(folder, num_saves, moment="", victims="", at_save="0"):
    """Restores, and says what; then saves with changing values until another process is lost.

    Args:
      folder: The directory of the checkpoints.
      num_saves: The number of saves.
      moment, victims, at_save: The moment at which processes kill themselves, their numbers, and the first save.
    """
    import logging
    import os
    import sys
    import time

    import jax

    import replicax as rx
    from changing_state import dies_at, differing, placed
    from replicax.testing import report

    warnings = []

    class Warnings(logging.Handler):
        def emit(self, record):
            if (
                "has been waiting" not in record.getMessage()
            ):  # for a process that starts late on a busy machine
                warnings.append(record.getMessage())

    logging.getLogger("replicax").addHandler(Warnings(logging.WARNING))
    rx.MultiWorkerMirroredStrategy(
        communication_options=rx.experimental.CommunicationOptions(timeout_seconds=100)
    )
    checkpoint = rx.Checkpoint(state=placed(0))
    manager = rx.CheckpointManager(checkpoint, folder, max_to_keep=2)
    found = sorted(os.listdir(folder))
    path = manager.restore_or_initialize()
    first = checkpoint.state["step"]
    report(
        restored=path and os.path.basename(path),
        wrong=differing(checkpoint.state, first),
        found=found,
        warnings=warnings,
        step=first,
    )
    if str(jax.process_index()) in victims.split(","):
        dies_at(moment, int(at_save))
    began = time.time()
    try:
        for step in range(first + 1, first + 1 + int(num_saves)):
            checkpoint.state = placed(step)
            began = time.time()
            manager.save(step)
            report(written=step - 1, begun=step)
        manager.close()
    except rx.errors.ClusterFailureError as error:
        report(
            lost=list(getattr(error, "tasks", ())),
            kind=type(error).__name__,
            raised_at=time.time(),
            began_at=began,
        )
        sys.exit(3)
    report(ended=True)
