# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._ps.keras.local_updates_callback import LocalUpdatesCallback as LocalUpdatesCallback
from replicax._src.keras.checkpoint_callback import CheckpointCallback as CheckpointCallback
from replicax._src.keras.tensorboard_callback import TensorBoard as TensorBoard

__all__ = [
    'CheckpointCallback',
    'LocalUpdatesCallback',
    'TensorBoard',
]
