"""The pods that JobSet, Kubeflow Trainer and the Job controller make of a manifest: their host names and environments."""

import re

TOKEN = "the token of the secret"
_FIELDS = {
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": lambda index: str(index),
    "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']": lambda index: "0",
}


def pods_of(jobset):
    """Yields the host and the container of each pod, with its environment.

    Hosts are <JobSet>-<replicated job>-<job>-<pod>.<subdomain>, which is the JobSet's name by default; the annotation
    batch.kubernetes.io/job-completion-index is the number of an indexed job's pod; $(NAME) in the value of a variable is
    another one, before it in the list.
    """
    name, network = jobset["metadata"]["name"], jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        (container,) = job["template"]["spec"]["containers"]
        for number in range(replicated["replicas"]):
            for index in range(job["completions"]):
                host = f"{name}-{replicated['name']}-{number}-{index}.{network.get('subdomain', name)}"
                yield host, container, environment_of(container["env"], index)


def environments_of(train_job):
    """Returns the environment of each pod of a TrainJob: ours, and what the runtime jax-distributed sets."""
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    assert train_job["spec"]["runtimeRef"] == {"name": "jax-distributed"}
    return [
        environment_of(trainer["env"], index)
        | {
            "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
            "JAX_PROCESS_ID": str(index),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
            "JAX_COORDINATOR_PORT": "29500",
            "JAX_DISTRIBUTED_BACKEND": "gloo",
        }
        for index in range(trainer["numNodes"])
    ]


def environment_of(variables, index):
    """Returns the environment of the pod with a completion index."""
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for variable in variables:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environment[variable["name"]] = _FIELDS[source["fieldRef"]["fieldPath"]](index)
        elif "secretKeyRef" in source:
            environment[variable["name"]] = TOKEN
        else:
            known = dict(environment)
            environment[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match, known=known: known.get(match[1], match[0]), variable["value"]
            )
    return environment
