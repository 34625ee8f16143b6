"""Tells the other tasks of a cluster that a task ended before all had joined, so that they do not wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Final

from replicax._src.cluster.control_messages import ask, security_of
from replicax._src.cluster.controller_process import ControllerServer
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import split_address
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.control.controller import Controller
from replicax._src.wire.sockets import listen

_ANSWER_S: Final = 1.0
_RETRY_S: Final = 0.2
_MOST_CHARACTERS: Final = 8000


def tell_failed_start(environment: Mapping[str, str], text: str, is_over: threading.Event) -> None:
    """Reports a failed task to the controller of its cluster as soon as the controller runs.

    The controller ignores the report if the task had joined. Worker 0 starts the controller. If worker 0 has not, or
    the controller has ended, this function runs a controller that only passes the report on.

    Args:
      environment: The environment of the task.
      text: Its ending in words.
      is_over: Set to make the function give up.
    """
    resolver = TFConfigClusterResolver(environ=environment)
    try:
        security = security_of(environment)
        me = Membership.of(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    except ClusterError:  # the task has reported it
        return
    if me.num_workers < 2 or me.is_evaluator:
        return
    text = text[-_MOST_CHARACTERS:]
    message = {"kind": "failed", "member": me.id_in_cluster, "cluster": me.described, "text": text}
    address = me.leader_address
    while not is_over.is_set():
        if me.id_in_cluster == 0:
            with contextlib.suppress(OSError):  # the port is in use: the task's own controller is there
                listening = listen(*split_address(me.leader_address))
                controller = Controller(me.names)
                controller.fail(0, text)
                ControllerServer(controller, listening, security, me.described, {}).run(is_over, 0.0)
                return
        try:
            ask(address, message, security, _ANSWER_S, environment)
            return
        except OSError:
            is_over.wait(_RETRY_S)
