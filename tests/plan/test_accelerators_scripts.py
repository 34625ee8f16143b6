"""``replicax plan`` of scripts for TPUs and GPUs: Keras models with wide layers, whose values are never made."""

import json
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)

GIB = 1 << 30
WIDTH, HIDDEN, NUM_LAYERS, ROWS = 8192, 28672, 3, 256
UNROLLED = f"""
import keras, numpy as np, replicax as rx

keras.config.set_dtype_policy("bfloat16")
strategy = rx.MirroredStrategy(shard_state="all")
with strategy.scope():
    rows = keras.Input(({WIDTH},))
    x = rows
    for _ in range({NUM_LAYERS}):
        h = keras.layers.RMSNormalization()(x)
        x = x + keras.layers.Dense({WIDTH})(keras.layers.Dense({HIDDEN}, activation="silu")(h))
    model = keras.Model(rows, keras.layers.Dense(256)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.zeros(({ROWS}, {WIDTH}), "float32"), np.zeros({ROWS}, "int32"), batch_size={ROWS})
print("this was run")
"""


@pytest.mark.parametrize("topology", ["v5p:16x16x16", "h100:512x8"])
def test_layers_of_a_model_of_seventy_billion_parameters(tmp_path, topology):
    script = tmp_path / "train.py"
    script.write_text(UNROLLED)
    command = [sys.executable, "-m", "replicax", "plan", "--json", "--topology", topology, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["num_devices"], facts["shard_size"], facts["rows_per_replica"]) == (4096, 256, ROWS)
    num_weights = NUM_LAYERS * 2 * WIDTH * HIDDEN  # without biases and the rest, which are few
    whole = 3 * 2 * num_weights  # and what Adam keeps
    divided = sum(array["device_bytes"] for array in facts["arrays"] if array["role"] == "variable")
    assert whole / 256 < divided < 1.05 * whole / 256
    kernels = [array for array in facts["arrays"] if array["shape"] == [WIDTH, HIDDEN]]
    assert len(kernels) == 3 * NUM_LAYERS
    assert all(256 in array["pieces"] for array in kernels)
    assert facts["memory"]["peak"] < 20 * GIB
    assert "this was run" not in done.stderr
    assert "traced in" in done.stderr  # says how far it is
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 8 * GIB


def test_a_topology_of_several_slices_by_its_vendors_name(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNROLLED.replace(str(WIDTH), "512").replace(str(HIDDEN), "1024"))
    command = [sys.executable, "-m", "replicax", "plan", "--topology", "2xv5litepod-16", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "on 2xv5e:4x4: 32 × TPU v5e" in done.stdout
    assert "on 2 slices" in done.stdout
