# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._src.keras.compiled_loss import compiled_loss as compiled_loss
from replicax._src.keras.data_model import DataModel as DataModel
from replicax._src.keras.file_names import model_path as model_path
from replicax._src.keras.file_names import weights_path as weights_path
from replicax._src.keras.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
from replicax.keras import callbacks as callbacks

__all__ = [
    'DataModel',
    'SidecarEvaluator',
    'callbacks',
    'compiled_loss',
    'model_path',
    'weights_path',
]
