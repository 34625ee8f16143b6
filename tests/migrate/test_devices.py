"""Programs that list and configure devices, as TensorFlow's guides do."""

import subprocess
import sys

import pytest

from checks import path_of_programs
from migrated import becomes, marks

GPUS = "import tensorflow as tf\ngpus = tf.config.list_physical_devices('GPU')\n"
# Each ends with the number of replicas and the names of the devices.
PROGRAMS = {
    "inline": """
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy()
""",
    "a name first": """
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy([d.name for d in tf.config.list_logical_devices("CPU")])
""",
    "gpus, else cpus": """
def devices():
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if gpus:
        try:
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
            print(len(gpus), "Physical GPUs,", len(tf.config.list_logical_devices("GPU")), "Logical GPUs")
        except RuntimeError as e:
            print(e)
    else:
        cpu = tf.config.experimental.list_physical_devices("CPU")[0]
        try:
            tf.config.experimental.set_virtual_device_configuration(
                cpu, [tf.config.experimental.VirtualDeviceConfiguration() for _ in range(2)]
            )
        except RuntimeError as e:
            print(e)
    return tf.config.list_logical_devices("GPU" if gpus else "CPU")

if len(tf.config.list_physical_devices("GPU")) > 1:
    strategy = tf.distribute.MirroredStrategy()
else:
    strategy = tf.distribute.MirroredStrategy(devices())
""",
}
END = """
for i in range(strategy.num_replicas_in_sync):
    with tf.device(strategy.extended.worker_devices[i]):
        print(tf.reduce_sum(tf.ones([3]) * i).numpy())
with tf.device("/gpu:0"):
    print(tf.ones([]).numpy())
for device in tf.config.list_logical_devices():
    with tf.device(device.name):
        print(device.name, device.device_type, tf.test.gpu_device_name())
"""
PRINTED = "0.0\n3.0\n1.0\n/device:CPU:0 CPU \n/device:CPU:1 CPU \n"  # by TensorFlow 2.21


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.rest if number else ()) for number, name in enumerate(PROGRAMS)],
)
def test_devices_are_configured_after_they_were_listed(name):
    text = "import tensorflow as tf\n" + PROGRAMS[name] + END
    assert marks(text) == []
    code = becomes(text)
    assert "tensorflow" not in code
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONPATH": path_of_programs()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == PRINTED, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=9)])\n",
        "for gpu in gpus:\n  tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(9)])\n",
    ],
)
def test_a_limit_of_a_gpus_memory_is_removed(text):
    assert marks(GPUS + text) == []
    assert "LogicalDevice" not in becomes(GPUS + text)
    assert "set_local_devices" not in becomes(GPUS + text)


def test_devices_that_are_parts_of_a_gpu_are_marked_once():
    text = GPUS + "if gpus:\n  try:\n    tf.config.set_logical_device_configuration(\n      gpus[0],\n"
    text += "      [tf.config.LogicalDeviceConfiguration(memory_limit=1024), tf.config.LogicalDeviceConfiguration()])\n"
    text += "  except RuntimeError as e:\n    print(e)\n"
    assert marks(text) == [("tf.config.set_logical_device_configuration", 5)]
    assert "[tf.config.LogicalDeviceConfiguration(memory_limit=1024), tf" in becomes(text)


def test_devices_that_are_hidden_are_marked_with_the_cure():
    text = GPUS + "if gpus:\n  tf.config.set_visible_devices(gpus[0], 'GPU')\n"
    assert "CUDA_VISIBLE_DEVICES" in becomes(text)
    assert len(marks(text)) == 1
    assert marks("import tensorflow as tf\ntf.config.set_visible_devices([], 'GPU')\n") == []
