"""Asks the controller of a cluster whose tasks run on other hosts whether they continue without a dead one.

Worker 0 leaves its controller behind when it dies.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, final

from replicax._src.cluster.control_messages import ask, security_of
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.tf_config import TFConfigClusterResolver

_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 1.0


def wait_while_it_serves(environment: Mapping[str, str], is_over: threading.Event) -> None:
    """Returns when the controller of a task's cluster does not answer, or has no member any more.

    Args:
      environment: The environment of the task.
      is_over: Set to make the function return.
    """
    while not is_over.is_set() and _serves(environment):
        is_over.wait(_PAUSE_S)


@final
class OtherHosts:
    """Asks once, in a thread, whether the tasks of other hosts continue without a dead task of this one.

    Args:
      environment: The environment of the dead task.

    Attributes:
      answer: True if they continue; None until the controller has answered, for at most 10 s.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.answer: bool | None = None
        self._environment = environment
        threading.Thread(target=self._ask, name="replicax-other-hosts", daemon=True).start()

    def _ask(self) -> None:
        answer = False
        try:
            answer = _serves(self._environment)
        finally:
            self.answer = answer


def _serves(environment: Mapping[str, str]) -> bool:
    """Returns True if the controller of a task's cluster serves other tasks than this one."""
    try:
        resolver = TFConfigClusterResolver(environ=environment)
        me = Membership.of(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
        answer = _answer_of(me.leader_address, environment)
    except (ClusterError, OSError):  # the task has reported the first
        return False
    is_serving = answer.get("cluster") == me.described and not answer.get("is_ending")
    return is_serving and any(member != me.id_in_cluster for member in answer.get("members", ()))


def _answer_of(address: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the controller's answer. It asks again if none comes in time, because a busy machine may be late."""
    try:
        return ask(address, {"kind": "ping"}, security_of(environment), _ANSWER_S, environment)
    except TimeoutError:
        return ask(address, {"kind": "ping"}, security_of(environment), _ANSWER_S, environment)
