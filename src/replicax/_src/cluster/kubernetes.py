"""``KubernetesClusterResolver``: the cluster of pods with certain labels. The ``kubernetes`` package is imported on
use.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from replicax._src.cluster.errors import ClusterManagerError
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec, join_address
from replicax._src.packaging.extras import missing_extra
from replicax._src.vocabulary.options import _NamedOption


class KubernetesExecutableLocation(_NamedOption):
    """The place where this program runs: a pod of the cluster, or elsewhere with a kubeconfig file."""

    WITHIN_CLUSTER = "WITHIN_CLUSTER"
    OFF_CLUSTER = "OFF_CLUSTER"


@final
class KubernetesClusterResolver(AddressedResolver):
    """The running pods that have certain labels. Every ``cluster_spec()`` asks the API server for them.

    The tasks of a job are the pods of its label selectors, in the order of the selectors. The pods of a selector are
    sorted by name, with numbers as numbers: ``job-2`` before ``job-10``. Set ``task_type`` and ``task_id``, because the
    resolver cannot know which task this process is; in an Indexed Job the id is the variable JOB_COMPLETION_INDEX. The
    addresses are those of the pods. TensorFlow uses those of their nodes, which other pods cannot reach without the
    host's network.

    Args:
      job_to_label_mapping: The label selectors of each job; by default ``{"worker": ["job-name=tensorflow"]}``.
      tf_server_port: The port of every task.
      rpc_layer: See ``ClusterResolver``.
      override_client: A ``kubernetes.client.CoreV1Api``, or an object with its ``list_pod_for_all_namespaces``, and
        ``list_namespaced_pod`` if a namespace is given.
      executable_location: The credentials to load, if there is no ``override_client``.
      namespace: The namespace of the pods. Listing one namespace needs fewer rights than listing all; the default.

    Raises:
      MissingExtraError: The package ``kubernetes`` is not installed, and there is no ``override_client``.
      ClusterManagerError: The credentials cannot be loaded.
      InvalidArgumentError: ``executable_location`` is not a ``KubernetesExecutableLocation``.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation | str = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
    ) -> None:
        location = KubernetesExecutableLocation.parse(executable_location)
        if override_client is None:
            override_client = loaded_client(location, "KubernetesClusterResolver").CoreV1Api()
        self._client = override_client
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self._namespace = namespace
        self.task_type = None
        self.task_id = None
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the current pods. It asks the API server once for each selector.

        Raises:
          ClusterManagerError: A pod does not run, a selector matches no pod, or the API server did not answer.
        """
        addresses = {
            job: [self._address(pod) for selector in selectors for pod in self._pods(selector)]
            for job, selectors in self._selectors.items()
        }
        return ClusterSpec(addresses, source="Kubernetes")

    def _pods(self, selector: str) -> list[Any]:
        """Returns the pods of one selector, sorted by name."""
        try:
            if self._namespace is None:
                found = self._client.list_pod_for_all_namespaces(label_selector=selector)
            else:
                found = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
        except Exception as error:  # its error classes exist only if the package is installed
            raise ClusterManagerError(
                f"Kubernetes did not list the pods with the label {selector!r}: {shown_error(error)}. If it answered 403, the "
                f"service account needs the right to list pods"
                + (", of all namespaces; or give namespace=…." if self._namespace is None else ".")
            ) from error
        if not found.items:
            where = f"namespace {self._namespace!r}" if self._namespace else "any namespace"
            raise ClusterManagerError(
                f"No pod in {where} has the label {selector!r}. Give the selectors of your pods: "
                f'job_to_label_mapping={{"worker": ["job-name=…"]}}.'
            )
        return sorted(found.items, key=lambda pod: _natural(pod.metadata.name))

    def _address(self, pod: Any) -> str:
        name, status = pod.metadata.name, pod.status
        if status.phase != "Running" or not status.pod_ip:
            raise ClusterManagerError(
                f'Pod "{name}" is not running; phase: "{status.phase}". Wait until all pods run, and delete those of '
                f"earlier jobs, or choose a selector that leaves them out."
            )
        return join_address(status.pod_ip, self._port)


def loaded_client(location: KubernetesExecutableLocation, what: str) -> Any:
    """Returns the module ``kubernetes.client``, with the credentials of the pod or of the user.

    Args:
      location: Whose credentials to load.
      what: The feature that needs the package, for messages.

    Raises:
      MissingExtraError: The package ``kubernetes`` is not installed.
      ClusterManagerError: The credentials cannot be loaded.
    """
    try:
        config = importlib.import_module("kubernetes.config")
        client = importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise missing_extra(what, "k8s") from error
    is_within = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    try:
        load = config.load_incluster_config if is_within else config.load_kube_config
        load()
    except Exception as error:
        other = "OFF_CLUSTER" if is_within else "WITHIN_CLUSTER"
        raise ClusterManagerError(
            f"The credentials of Kubernetes cannot be loaded: {shown_error(error)}. The executable location is "
            f"{location.name}; if that is not where this program runs, give executable_location={other!r}."
        ) from error
    return client


def _natural(name: str) -> list[tuple[str, int]]:
    """Returns a sort key in which numbers sort as numbers: ``job-10`` gives [("job-", 10)]."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name) if text or number]


def shown_error(error: Exception) -> str:
    """Returns the class and the text of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:200] + '…'}"
