"""The error for missing packages of parameter servers."""

import pytest

from checks import in_a_process_of_its_own


@pytest.mark.rest
def test_a_server_names_its_packages_first():
    program = """
    import sys
    for name in ("xxhash", "cloudpickle"):
        sys.modules[name] = None
    import replicax as rx
    try:
        rx.Server.create_local_server()
    except rx.errors.MissingExtraError as error:
        print(error)
    """
    line = in_a_process_of_its_own(program, "-W", "error")
    assert "needs xxhash and cloudpickle, which" in line
    assert "Run: pip install xxhash cloudpickle (the extra ps)" in line
