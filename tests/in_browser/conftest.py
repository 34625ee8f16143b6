"""The tests of the page in a browser, which `make test-browser` runs. There a missing browser is a failure."""

import os
import pathlib

import pytest

from browser import MISSING, Browser, path_of_browser

IS_ASKED_FOR = bool(os.environ.get("REPLICAX_TEST_BROWSER"))

collect_ignore = (
    [] if IS_ASKED_FOR else [path.name for path in pathlib.Path(__file__).parent.glob("test_*.py")]
)


def pytest_configure(config):
    if IS_ASKED_FOR and path_of_browser() is None:
        pytest.exit(MISSING, returncode=1)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One browser for all tests."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
