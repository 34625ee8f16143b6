"""The how-to pages are short, state their result first, and are in the index."""

import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "how_to"
PAGES = [path for path in sorted(FOLDER.glob("*.md")) if path.name != "index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_at_most_800_words_and_states_its_result_first(page):
    text = page.read_text()
    assert len(text.split()) <= 800
    title, first = text.split("\n\n")[:2]
    assert title.startswith("# ")
    assert first.startswith("You get ")


def test_the_index_lists_each_page_once():
    listed = re.findall(r"\]\((\w+\.md)\)", (FOLDER / "index.md").read_text())
    assert sorted(listed) == [page.name for page in PAGES]
