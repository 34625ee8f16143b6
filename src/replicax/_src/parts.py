"""The registry: which module provides what lower layers and public modules ask for by name. Only a table; ``hooks.py``
reads it. No other file of the core names a part.
"""

from typing import Final

# A hook, and the module that provides it, in a higher layer or in a part.
HOOKS: Final = {
    "command_line": "replicax._launch.command_line",
    "default_strategy": "replicax._src.strategies.default",
    "device_listing": "replicax._src.devices.listing",
    "diagnostics": "replicax._src.diagnostics.reactions",
    "names_of_tensorflow": "replicax._migrate.table",
    "pytest_fixtures": "replicax._testing.fixtures",
    "tpu_system": "replicax._src.strategies.tpu_system",
    "keras": "replicax._src.keras.bridge",
    "keras_on_servers": "replicax._ps.keras.on_servers",
    "nnx": "replicax._src.frameworks.nnx",
    "exported_keras_files": "replicax._src.keras.exported_files",
    "plan": "replicax._plan.planning",
    "plan_picture": "replicax._plan.picture",
    "plan_report": "replicax._plan.printed_plan",
    "pictures": "replicax._plan.pictures.strategies",
}

# Public names of parts: the module that has them, the public module, names.
PUBLIC: Final = (
    ("replicax._ps.strategy.parameter_server", "replicax", "ParameterServerStrategy"),
    ("replicax._ps.strategy.parameter_server", "replicax.experimental", "ParameterServerStrategy"),
    ("replicax._ps.task.server_def", "replicax", "ServerDef ServerOptions"),
    ("replicax._ps.task.task", "replicax", "Server"),
    ("replicax._ps.coordinator.cluster_coordinator", "replicax.coordinator", "ClusterCoordinator"),
    ("replicax._ps.coordinator.remote_value", "replicax.coordinator", "RemoteValue"),
    ("replicax._ps.coordinator.per_worker", "replicax.coordinator",
     "PerWorkerDataset PerWorkerIterator PerWorkerValue PerWorkerValues experimental_get_current_worker_index"),
    ("replicax._ps.coordinator.per_worker_variable", "replicax.experimental", "PerWorkerVariable"),
    ("replicax._ps.local_updates.training_group", "replicax.experimental", "LocalUpdates"),
    ("replicax._ps.keras.local_updates_callback", "replicax.keras.callbacks", "LocalUpdatesCallback"),
    ("replicax._ps.placement.table_files", "replicax.experimental", "load_table save_table"),
    ("replicax._ps.transport.rpc", "replicax.experimental.rpc", "Client Server StatusOrResult"),
    ("replicax._plan.pictures.visualize", "replicax", "visualize"),
    ("replicax._launch.ray.server_actors", "replicax.ray", "parameter_servers"),
    ("replicax._launch.ray.training", "replicax.ray", "ReplicaxConfig fit report"),
    ("replicax._testing.check", "replicax.testing", "check_against_one_device"),
    ("replicax._testing.cluster", "replicax.testing", "LocalCluster server_cluster"),
    ("replicax._testing.comparison_report", "replicax.testing", "Difference OneDeviceReport"),
    ("replicax._testing.task_reports", "replicax.testing", "report"),
    ("replicax._ps.local_updates.group_replay", "replicax.testing", "ReplayReport replay_groups"),
    ("replicax._testing.local_tasks", "replicax.testing", "ClusterResults LocalTask TaskResult"),
)  # fmt: skip
