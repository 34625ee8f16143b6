"""Which tasks a cluster has and which of them this process is: ``rx.cluster_resolver``."""

from replicax._src.cluster.detect import PassedOver, ResolverChoice, choose_resolver
from replicax._src.cluster.gce import GCEClusterResolver
from replicax._src.cluster.jax_distributed import JaxClusterResolver
from replicax._src.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.open_mpi import OpenMPIClusterResolver
from replicax._src.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from replicax._src.cluster.sagemaker import SageMakerClusterResolver
from replicax._src.cluster.slurm import SlurmClusterResolver
from replicax._src.cluster.spec import UNKNOWN_ADDRESS, ClusterDef, ClusterSpec, JobDef, Task
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.cluster.torchrun import TorchrunClusterResolver
from replicax._src.cluster.tpu import TPUClusterResolver
from replicax._src.user.public_names import publish_all

__all__ = [
    "UNKNOWN_ADDRESS",
    "ClusterDef",
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "JaxClusterResolver",
    "JobDef",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "Membership",
    "OpenMPIClusterResolver",
    "PassedOver",
    "ResolverChoice",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "Task",
    "TorchrunClusterResolver",
    "UnionResolver",
    "choose_resolver",
]

__dir__ = publish_all(globals())
