"""Errors that a server or a worker sends."""

from foreign_text import NAME, shows_no_control_characters
from replicax._ps.errors import error_from_answer


def test_foreign_text_has_no_control_characters_in_a_servers_error():
    error = error_from_answer({"type": NAME, "text": NAME, "details": {"line": NAME}}, "ps 0")
    shows_no_control_characters(str(error))
