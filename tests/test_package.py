"""The contents of a release: the metadata, the links of the README, the wheel and the source archive."""

import email.parser
import itertools
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import replicax as rx
from replicax._src.packaging import home
from replicax._src.packaging.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HATCH_BUILD = runpy.run_path(str(ROOT / "hatch_build.py"))
ELSEWHERE = re.compile(r"https?://|mailto:|#")


def required(requirements):
    return {re.match(r"[A-Za-z0-9_-]+", requirement)[0] for requirement in requirements}


def test_messages_name_the_packages_that_extras_install():
    """The packages of an extra of the table; the other extras are for developers, or groups of these."""
    optional = PROJECT["optional-dependencies"]
    assert set(optional) - set(EXTRAS) == {"all", "dev", "examples", "test"}
    for extra, packages in EXTRAS.items():
        assert {package.name for package in packages} == required(optional[extra]), extra


def test_no_version_is_too_new():
    requirements = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    capped = [requirement for requirement in requirements if re.search(r"<|==|~=|!=", requirement)]
    assert not capped
    assert not re.search(r"<|==|~=", PROJECT["requires-python"])


def build(folder, target, source=ROOT):
    """Builds with hatchling, without network and isolation; returns the file."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return build(tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel"), "wheel"))


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(wheel.read(name).decode())


@pytest.mark.rest
def test_the_metadata(metadata):
    assert metadata["Name"] == "replicax"
    assert metadata["Version"] == rx.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", ()))
    assert urls == HATCH_BUILD["urls"](home.REPOSITORY, home.SITE)
    kinds = {classifier.partition(" :: ")[0] for classifier in metadata.get_all("Classifier")}
    assert {"Operating System", "Framework", "Programming Language", "Development Status"} <= kinds


def test_addresses_are_those_of_the_public_home():
    urls = HATCH_BUILD["urls"]
    assert urls("", "") == {}
    full = urls("https://example.com/r", "https://docs.example.com")
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= set(full)
    assert all(url.startswith("https://") for url in full.values())


def test_without_a_public_home_links_to_files_are_their_names():
    named = HATCH_BUILD["with_named_files"]
    assert named("See [a `b`](docs/c.md#d), [e](./f.py).") == "See a `b` (docs/c.md), e (f.py)."
    for text in ("[a](https://b/c.md)", "[a](#b)", "```md\n[a](b.md)\n```", "![a](b.png)"):
        assert named(text) == text


@pytest.mark.rest
def test_links_in_code_stay_and_each_picture_of_a_set_is_found():
    rewrite = HATCH_BUILD["with_absolute_links"]
    at = "https://example.com/r"
    fenced = "".join(f"{fence}md\n[a](b.md)\n{fence}\n" for fence in ("```", "~~~"))
    assert rewrite(fenced + "`[a](b.md)`", at, "main") == fenced + "`[a](b.md)`"
    assert rewrite(fenced + "[a](b.md)", at, "main") == fenced + f"[a]({at}/blob/main/b.md)"
    several = '<source srcset="a.png 1x, ./b.png 2x, https://c/d.png 3x">'
    raw = f"{at}/raw/main"
    assert (
        rewrite(several, at, "main")
        == f'<source srcset="{raw}/a.png 1x, {raw}/b.png 2x, https://c/d.png 3x">'
    )


def test_links_of_the_readme_work_on_the_package_index(metadata):
    """Links to files lead into the public repository; while there is none, the text names the files instead."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = re.sub(r"^```.*?^```", "", metadata.get_payload(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)', text)
    targets += re.findall(r"^\[[^\]]+\]: *(\S+)", text, re.MULTILINE)
    assert targets
    assert not [target for target in targets if not ELSEWHERE.match(target)]
    headings = [line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {target[1:] for target in targets if target.startswith("#")} <= anchors


@pytest.mark.rest
def test_wheel_contains_only_the_package(wheel):
    names = wheel.namelist()
    assert {name.partition("/")[0] for name in names} == {"replicax", f"replicax-{rx.__version__}.dist-info"}
    assert "replicax/py.typed" in names
    of_package = {name for name in names if name.startswith("replicax/")}
    here = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "replicax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert of_package == here
    (scripts,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "replicax = replicax.__main__:main" in wheel.read(scripts).decode()


@pytest.mark.rest
def test_the_source_archive_builds_the_same_wheel(archive, wheel, metadata, tmp_path):
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"src", "tests", "docs", "examples", "LICENSE", "CHANGELOG.md"} <= {
        p.name for p in source.iterdir()
    }
    again = zipfile.ZipFile(build(tmp_path / "built", "wheel", source))
    assert sorted(again.namelist()) == sorted(wheel.namelist())
    (name,) = [name for name in again.namelist() if name.endswith(".dist-info/METADATA")]
    assert again.read(name).decode() == wheel.read(name).decode()
