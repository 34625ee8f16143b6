"""Tells the other tasks of a cluster that one has ended before all had joined, so that they do not wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Final

from replicax._src.cluster.controller import Controller
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.frames import ask, security_of
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.service import ControllerServer
from replicax._src.cluster.spec import split_address
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.wire.sockets import listen

_ANSWER_S: Final = 1.0
_RETRY_S: Final = 0.2
_MOST_CHARACTERS: Final = 8000


def tell_failed_start(environment: Mapping[str, str], text: str, is_over: threading.Event) -> None:
    """Tells the controller of a task's cluster, as soon as it is there; it knows whether the task had joined.

    Worker 0 starts the controller: if it has not, or its controller has ended, a controller that only says so is run
      here.

    Args:
      environment: Of the task.
      text: How it ended.
      is_over: Gives up when it is set.
    """
    resolver = TFConfigClusterResolver(environ=environment)
    try:
        security = security_of(environment)
        me = Membership.of(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    except ClusterError:  # the task has said so
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
