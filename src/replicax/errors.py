"""Every exception that replicax raises on purpose: ``rx.errors``. See ``docs/errors.md``."""

from replicax._src.cluster.errors import (
    AddressError,
    ClusterEnvironmentError,
    ClusterError,
    ClusterManagerError,
    ClusterTypeError,
    RepeatedTaskError,
    TaskError,
)
from replicax._src.cluster.failures import (
    ClusterFailureError,
    ClusterStartError,
    PeerFailureError,
    ProgramMismatchError,
)
from replicax._src.cluster.processes import ProcessStartError, ProcessTimeoutError
from replicax._src.errors import (
    BackendStartedError,
    ContextError,
    CrossReplicaContextError,
    DeviceError,
    DivergenceError,
    DivergentCollectiveError,
    DonatedError,
    InvalidArgumentError,
    IterationContextError,
    KerasBackendError,
    KerasLossError,
    KerasScopeError,
    MissingExtraError,
    MixedStrategiesError,
    OneDeviceDifferenceError,
    PerReplicaUseError,
    ReductionError,
    ReplicaContextError,
    ReplicaxError,
    ScopeNestingError,
    StructureError,
    TapeError,
    TracedConditionError,
    TraceError,
    UnsupportedError,
    VariableError,
)
from replicax._src.input.agreed import WorkersDifferError
from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError
from replicax._src.input.autoshard import NotEnoughFilesError
from replicax._src.input.dataset import ClosedIteratorError, EmptyOptionalError, OutOfRangeError
from replicax._src.input.elements import (
    DatasetLengthError,
    EmptyDatasetError,
    NotResumableError,
    OneShotSourceError,
)
from replicax._src.input.files.columns import ColumnError
from replicax._src.input.files.formats import UnreadableFileError
from replicax._src.input.files.paths import MissingFileError
from replicax._src.input.opening import UnsupportedSourceError
from replicax._src.input.sources import UnbatchedDatasetError
from replicax._src.testing.tasks import TaskFailedError

__all__ = [
    "AddressError",
    "BackendStartedError",
    "ClosedIteratorError",
    "ClusterEnvironmentError",
    "ClusterError",
    "ClusterFailureError",
    "ClusterManagerError",
    "ClusterStartError",
    "ClusterTypeError",
    "ColumnError",
    "ContextError",
    "CrossReplicaContextError",
    "DatasetLengthError",
    "DeviceError",
    "DivergenceError",
    "DivergentCollectiveError",
    "DonatedError",
    "EmptyDatasetError",
    "EmptyOptionalError",
    "InconsistentRowsError",
    "InvalidArgumentError",
    "IterationContextError",
    "KerasBackendError",
    "KerasLossError",
    "KerasScopeError",
    "MissingExtraError",
    "MissingFileError",
    "MixedStrategiesError",
    "NotEnoughFilesError",
    "NotResumableError",
    "OneDeviceDifferenceError",
    "OneShotSourceError",
    "OutOfRangeError",
    "PeerFailureError",
    "PerReplicaUseError",
    "ProcessStartError",
    "ProcessTimeoutError",
    "ProgramMismatchError",
    "ReductionError",
    "RepeatedTaskError",
    "ReplicaContextError",
    "ReplicaxError",
    "ScopeNestingError",
    "StructureError",
    "TapeError",
    "TaskError",
    "TaskFailedError",
    "TraceError",
    "TracedConditionError",
    "UnbatchedDatasetError",
    "UnreadableFileError",
    "UnsupportedElementError",
    "UnsupportedError",
    "UnsupportedSourceError",
    "VariableError",
    "WorkersDifferError",
]
