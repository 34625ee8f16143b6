"""Files of weights that each worker of a cluster loads, in little more memory than that of its shards."""

import zlib

import numpy as np

from checks import path_of_programs
from replicax.testing import LocalCluster

# An array of 256 KiB and more has pages of its own, which go back when it is freed.
ENVIRONMENT = {"KERAS_BACKEND": "jax", "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


def load(how, *files_and_layers):
    """Loads a small model and a large one of equal layers. Reports the memory that the second took."""
    import gc
    import pathlib
    import re
    import zlib

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(shard_state="all")

    def made(num_layers, width):
        layers = [
            keras.layers.Dense(width, use_bias=False, kernel_initializer="zeros") for _ in range(num_layers)
        ]
        return keras.Sequential([keras.Input((width,)), *layers])

    def loaded(file, num_layers, width):
        if how == "model":
            return keras.models.load_model(file)
        if how == "preset":
            import keras_hub

            return keras_hub.models.Backbone.from_preset(file)
        model = made(int(num_layers), int(width))
        forget_peak()
        if how == "weights":
            model.load_weights(file)
        else:
            rx.checkpoint.load_safetensors(model, file)
        return model

    def memory(name):
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])

    def forget_peak():
        pathlib.Path("/proc/self/clear_refs").write_text("5")

    small, large = files_and_layers[:3], files_and_layers[3:]
    with strategy.scope():
        loaded(*small)
        keras.utils.clear_session()
        gc.collect()
        forget_peak()
        before, code = memory("VmRSS"), memory("RssFile")
        model = loaded(*large)
        # Python's and JAX's own code may be read from its files meanwhile.
        peak = memory("VmHWM") - before - (memory("RssFile") - code)
        if how in ("weights", "safetensors"):
            try:
                loaded(small[0], small[1], int(small[2]) // 2)
            except ValueError as error:
                report(failed=[type(error).__name__, str(error)])
    shards = [variable._value.addressable_shards[0] for variable in model.weights]
    report(
        peak=peak,
        shards=[
            [
                shard.data.nbytes,
                [[one.start, one.stop] for one in shard.index],
                zlib.crc32(np.asarray(shard.data)),
            ]
            for shard in shards
        ],
    )


def check(how, small, large, values):
    """Loads in two workers, and compares the numbers and the memory.

    Args:
      how: How it is loaded.
      small, large: The file of each model, its number of layers, and their width.
      values: Those of the variables of the large one.

    Returns:
      The reports of the workers.
    """
    with LocalCluster(
        2, environment={**ENVIRONMENT, "PYTHONPATH": path_of_programs()}, timeout_s=170
    ) as cluster:
        cluster.start(load, [str(each) for each in (how, *small, *large)])
        results = cluster.wait()
        results.raise_if_failed()
    reports = [result.report for result in results.values()]
    largest, total = max(value.nbytes for value in values), sum(value.nbytes for value in values)
    for report in reports:
        held = 0
        for (num_bytes, index, checksum), value in zip(report["shards"], values, strict=True):
            part = np.ascontiguousarray(value[tuple(slice(*each) for each in index)])
            assert checksum == zlib.crc32(part)
            held += num_bytes
        assert held < 0.55 * total
        # Loading takes a variable and, on the way to the device, its shard twice. Keras makes a small variable in full on
        # one device, and JAX compares it among the processes before it is sharded.
        most = held + (2 if how in ("weights", "safetensors") else 6) * largest + (6 << 20)
        assert report["peak"] < most, [number / 2**20 for number in (report["peak"], held, largest, total)]
        assert most < 0.8 * total
    return reports
