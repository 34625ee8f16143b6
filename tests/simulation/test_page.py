"""The page on scenarios has a program that runs, and names what the world does."""

import pathlib

from page_listings import check_listings
from simulation.world import World

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "simulation.md").read_text()


def test_scenario_of_the_page_finds_what_it_says(tmp_path):
    environment = {"PYTHONPATH": str(ROOT / "tests")}
    check_listings(PAGE, tmp_path, environment)


def test_page_has_every_fault_of_the_world():
    for kind in ("kill", "lose host", "pause", "cut", "part", "part one way"):
        assert f"`{kind}`" in PAGE
        assert f"``{kind}``" in World.inject.__doc__
