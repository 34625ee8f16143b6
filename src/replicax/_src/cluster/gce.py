"""``GCEClusterResolver``: the cluster of a Compute Engine instance group. Google's packages are imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, final

from replicax._src.cluster.errors import ClusterManagerError
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec, join_address
from replicax._src.packaging.extras import missing_extra
from replicax._src.vocabulary.errors import UnsupportedError


@final
class GCEClusterResolver(AddressedResolver):
    """The running instances of an instance group. Every ``cluster_spec()`` asks Compute Engine for them.

    The tasks are sorted by address, as texts. Give ``task_id``, because the resolver cannot know which task this
    process is.

    Args:
      project: The name of the project.
      zone: The zone of the instance group.
      instance_group: The name of the instance group.
      port: The port of all tasks.
      task_type: The job of the instances.
      task_id: The index of this instance, in the order of the addresses.
      rpc_layer: See ``ClusterResolver``.
      credentials: The credentials of google-auth; ``"default"`` finds those of the machine.
      service: The object for ``compute``, ``v1`` that ``googleapiclient.discovery.build`` returns. With it, no
        credentials are needed.

    Raises:
      MissingExtraError: Google's packages are not installed, and there is no ``service``.
      ClusterManagerError: The credentials cannot be found.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = port
        self._task_type = task_type
        self._service = _service(credentials) if service is None else service
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @property
    def task_type(self) -> str:
        """The job of the instances. It cannot be changed."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str) -> None:
        raise UnsupportedError(
            "You cannot reset the task_type of the GCEClusterResolver after it has been created: its instances are of "
            f"this type. Make another with task_type={task_type!r}."
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances that run now. It asks Compute Engine once for the group and once for each instance.

        Raises:
          ClusterManagerError: No instance of the group runs, or the request to Compute Engine failed.
        """
        try:
            addresses = sorted(self._address(name) for name in self._instance_names())
        except Exception as error:  # its error classes exist only if the package is installed
            raise ClusterManagerError(
                f"Compute Engine did not list the instances of {self._group()}: {type(error).__name__}: {error}. Check the "
                f"names, and that the service account may read instances."
            ) from error
        if not addresses:
            raise ClusterManagerError(
                f"No instance is running in {self._group()}. Start the instances, or correct the names."
            )
        return ClusterSpec({self._task_type: addresses}, source="Compute Engine")

    def _group(self) -> str:
        return f"instance group {self._instance_group!r}, zone {self._zone!r}, project {self._project!r}"

    def _instance_names(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            response = request.execute()
            for instance in response.get("items", ()):
                yield instance["instance"].rpartition("/")[2]
            request = groups.listInstances_next(previous_request=request, previous_response=response)

    def _address(self, instance: str) -> str:
        request = self._service.instances().get(project=self._project, zone=self._zone, instance=instance)
        return join_address(request.execute()["networkInterfaces"][0]["networkIP"], self._port)


def _service(credentials: Any) -> Any:
    """Returns Google's client for Compute Engine."""
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
        auth = importlib.import_module("google.auth")
    except ImportError as error:
        raise missing_extra("GCEClusterResolver", "gce") from error
    if isinstance(credentials, str) and credentials == "default":
        try:
            credentials, _ = auth.default(scopes=["https://www.googleapis.com/auth/compute.readonly"])
        except Exception as error:
            raise ClusterManagerError(
                f"Google's credentials cannot be found: {error} Give credentials=…, or run on an instance with a service "
                f"account."
            ) from error
    return discovery.build("compute", "v1", credentials=credentials)
