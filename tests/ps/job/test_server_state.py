"""Which process of a parameter server counts."""

from replicax._ps.job.server_state import ServerState


def test_late_answer_of_a_process_that_was_never_accepted_replaces_nothing():
    state = ServerState(0, "a")
    for instance in ("b", "c"):
        state.answered(instance, 1.0)
    state.accept("c")
    state.answered("b", 2.0)
    assert (state.is_replaced, state.last_instance) == (False, "c")
