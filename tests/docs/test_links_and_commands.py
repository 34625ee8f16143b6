"""No link and no command that replicax prints leads nowhere: on its pages, in its messages, in its examples.

``src/replicax/_src/packaging/home.py`` says where replicax is published. The tests read the sources, and use no network.
"""

import ast
import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from replicax._src.packaging import home
from replicax._src.packaging.extras import EXTRAS, install_packages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = [
    path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and path.suffix != ".pyc"
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
    *(path for path in EXAMPLES if path.suffix == ".md"),
]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
PRINTED = [*PAGES, *NOTEBOOKS, *SOURCES, *EXAMPLES, ROOT / "pyproject.toml", DOCS / "conf.py"]
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*([^)\s]+)\)|<img src=\"([^\"]+)\"")
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:")
INSTALL = re.compile(
    r"\bpip3? install +((?:\"[^\"\n]+\"|'[^'\n]+'|[\w.,:=/@+\[\]-]+)(?: +(?:\"[^\"\n]+\"|'[^'\n]+'|[\w.,:=/@+\[\]-]+))*)"
)
EXTRAS_OF_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(
        slug if not number else f"{slug}-{number}"
        for slug, most in found.items()
        for number in range(most + 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_lead_to_files_and_headings(page):
    dead = []
    for target in (one or other for one, other in LINK.findall(CODE.sub("", page.read_text()))):
        if OUTSIDE.match(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            dead.append(target)
    assert dead == []


def test_links_from_the_readme_reach_every_page():
    """The site has a menu. In a checkout there are only links."""
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = (one or other for one, other in LINK.findall(CODE.sub("", page.read_text())))
        files = [
            (page.parent / target.partition("#")[0]).resolve()
            for target in targets
            if not OUTSIDE.match(target)
        ]
        left += [file for file in files if file.suffix == ".md" and file.exists()]
    assert [ids(page) for page in DOCS.rglob("*.md") if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_of_pages_to_files_of_replicax_are_relative(page):
    """So that they work in a checkout; the site and the wheel make them absolute where there is a public home."""
    assert home.REPOSITORY == "" or home.REPOSITORY not in page.read_text()
    assert home.SITE == "" or home.SITE not in page.read_text()


def test_nothing_names_a_public_home_that_is_not_the_one_of_the_setting():
    """An address that has replicax as a part of its own is one of replicax."""
    address = re.compile(r"https?://[^\s)\"'>`\\]*\breplicax\b[^\s)\"'>`\\]*")
    homes = tuple(filter(None, (home.REPOSITORY, home.SITE)))
    examples = ("https://replicax.example.com", "https://example.com/")
    wrong = [
        f"{ids(path)}: {found}"
        for path in PRINTED
        for found in address.findall(path.read_text())
        if not found.startswith((*homes, *examples))
    ]
    assert wrong == []


def test_pages_and_messages_name_files_of_the_docs_that_exist():
    named = re.compile(r"(?<![\w./])docs/[\w/.-]+\.(?:md|py|ipynb)\b")
    missing = [
        f"{ids(path)}: {name}"
        for path in PRINTED
        for name in named.findall(path.read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """The calls of a function of ``home`` in the sources."""
    found = []
    for path in SOURCES:
        if re.search(
            rf"^from replicax._src.packaging.home import .*\b{name}\b", path.read_text(), re.MULTILINE
        ):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [
                (path, node)
                for node in nodes
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
            ]
    return found


def test_messages_name_pages_by_their_titles():
    named = calls("page")
    assert named
    for path, call in named:
        title, file = (ast.literal_eval(argument) for argument in call.args)
        assert (DOCS / file).read_text().startswith(f"# {title}\n"), ids(path)


def test_a_page_is_named_by_its_address_where_there_is_a_site():
    assert "docs/how_to/data.md" in home.page("Feed data", "how_to/data.md", site="")
    assert home.page("Feed data", "how_to/data.md", site="https://a.b") == "https://a.b/how_to/data.html"


def test_one_function_makes_the_install_commands_of_messages():
    """``home.install_command``; the others call it."""
    written = [ids(path) for path in SOURCES if "pip install" in path.read_text()]
    doctests = ["src/replicax/_src/packaging/extras.py"]
    assert [path for path in written if path not in doctests] == ["src/replicax/_src/packaging/home.py"]


def known_packages() -> set[str]:
    """The packages that environments of this repository have, and those of other projects that pages name."""
    names = {"tensorboard", "xprof", "notebook", "jax", "libtpu", "jax-cuda12-plugin", "ray", "tensorflow"}
    for lock in ROOT.glob("*.lock"):
        names |= {
            line.partition("==")[0].lower() for line in lock.read_text().splitlines() if "==" in line[:60]
        }
    return {name.replace("_", "-") for name in names} | {
        package.name.lower() for extra in EXTRAS.values() for package in extra
    }


def check_installs(command: str, where: str) -> None:
    """Checks the arguments of a ``pip install``: a shell leaves them whole, and pip finds what they name."""
    for written in re.findall(r"\"[^\"]+\"|'[^']+'|[^\s\"']+", command):
        assert written[0] in "\"'" or not set(written) & set("[]<>*"), f"{where}: {written} needs quotes"
    for argument in shlex.split(command):
        if argument.startswith("-"):
            continue
        of_here = re.fullmatch(r"(?:\.|replicax|/replicax)(?:\[([\w,-]+)\])?", argument)
        if of_here is None:
            requirement = Requirement(argument)
            assert requirement.name.lower().replace("_", "-") in known_packages(), f"{where}: {argument}"
            continue
        extras = set(filter(None, (of_here[1] or "").split(",")))
        assert extras <= set(EXTRAS_OF_PROJECT), f"{where}: {argument}"
        assert home.IS_ON_INDEX or not argument.startswith("replicax"), f"{where}: {argument} is on no index"


def test_install_commands_of_pages_and_examples_name_what_pip_finds():
    found = 0
    for path in (*PAGES, *EXAMPLES):
        for command in INSTALL.findall(path.read_text()):
            check_installs(command, ids(path))
            found += 1
    assert found > 20


def test_install_commands_of_messages_name_what_pip_finds():
    commands = [install_packages(packages) for packages in EXTRAS.values()]
    for _, call in calls("install_command"):
        if all(isinstance(argument, ast.Constant) for argument in call.args):
            commands.append(home.install_command(*(ast.literal_eval(argument) for argument in call.args)))
    for command in commands:
        assert INSTALL.fullmatch(command), command
        check_installs(command.removeprefix("pip install "), "a message")


@pytest.mark.rest
def test_pip_takes_the_commands_of_the_pages():
    """Each extra that a page installs, with pip itself, in the folder of the source."""
    text = "".join(path.read_text() for path in PAGES)
    extras = {
        extra
        for listed in re.findall(r"pip install ['\"](?:\.|replicax)\[([\w,-]+)\]", text)
        for extra in listed.split(",")
    }
    assert {"keras", "checkpoint", "migrate"} <= extras
    options = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f".[{','.join(sorted(extras))}]"],
        cwd=ROOT,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_listings_say_their_language(page):
    """One that has it in its first line instead is not run, and reads badly."""
    assert re.findall(r"^```\n(?:python|bash|text|sh)$", page.read_text(), re.MULTILINE) == []


def test_pages_are_current():
    """``make pages`` fills the blocks of pages and writes the notebooks from the code."""
    generated = runpy.run_path(str(DOCS / "generate.py"))["generated"]()
    stale = [ids(path) for path, text in generated if not path.exists() or path.read_text() != text]
    assert stale == [], "run make pages"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_a_reader_of_the_file_sees_no_directive(page):
    """A directive or role of the site is noise, or an empty place, in the checkout."""
    text = page.read_text()
    listings = re.compile(r"^(`{3,})(?!\{).*?^\1$", re.MULTILINE | re.DOTALL)
    outside = listings.sub("", text)
    assert re.findall(r"^ *(?:```|:::)+ *\{.*", outside, re.MULTILINE) == []
    assert re.findall(r"\{[\w:-]+\}`[^`]+`", outside) == []
    assert re.findall(r"^\([\w-]+\)=$", outside, re.MULTILINE) == []
    assert not text.startswith("---\n")
    assert text.count("<!-- make pages: ") == text.count("<!-- end -->")
