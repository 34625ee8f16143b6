"""The pages of the site list what the code has: every public name, command, environment variable and extra."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re
import runpy
import tomllib

import pytest

import replicax
from replicax.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = re.compile(r"^<!-- make pages: api (\S+)\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^<!-- make pages: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def public_names() -> list[str]:
    modules = [replicax.__name__]
    modules += [m.name for m in pkgutil.walk_packages(replicax.__path__, "replicax.") if "._" not in m.name]
    names = []
    for name in modules:
        module = importlib.import_module(name)
        public = [
            last for last in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, last))
        ]
        names += [f"{name}.{last}" for last in public]
    return names


@functools.cache
def names_on_pages() -> dict[str, list[str]]:
    """The names that the pages of the API list, with their pages."""
    found: dict[str, list[str]] = {}
    for page in sorted((DOCS / "reference" / "api").glob("*.md")):
        for module, names in API.findall(page.read_text()):
            for name in names.split():
                found.setdefault(f"{module}.{name}", []).append(page.name)
    return found


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_stands_on_one_page(name):
    assert len(names_on_pages().get(name, [])) == 1


def test_the_pages_list_no_name_that_does_not_exist():
    for name in names_on_pages():
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_every_page_of_the_api_is_in_its_index():
    index = (DOCS / "reference" / "api" / "index.md").read_text().split()
    pages = [page.stem for page in (DOCS / "reference" / "api").glob("*.md") if page.stem != "index"]
    assert [page for page in pages if page not in index] == []


def internal_members() -> dict[str, list[str]]:
    """The members that the extension of the site leaves out, by class."""
    tree = ast.parse((DOCS / "extensions" / "public_names.py").read_text())
    (table,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "INTERNAL"
    ]
    return {name: members.split() for name, members in ast.literal_eval(table).items()}


@pytest.mark.parametrize(("name", "members"), internal_members().items())
def test_omitted_members_exist_and_are_on_no_page(name, members):
    (cls,) = {
        value
        for path in public_names()
        if path.endswith(f".{name}")
        and isinstance(value := getattr(importlib.import_module(path.rpartition(".")[0]), name), type)
    }
    assert [member for member in members if not hasattr(cls, member)] == []
    pages = "".join(page.read_text() for page in (DOCS / "how_to").glob("*.md"))
    for own in dict.fromkeys(members):
        assert f"rx.{name}.{own}" not in pages


# Strings in capitals that are names of other things.
NOT_VARIABLES = [
    "DT_DOUBLE",
    "DT_FLOAT",
    "DT_STRING",
    "OFF_CLUSTER",
    "ONLY_FIRST_REPLICA",
    "ON_READ",
    "ON_WRITE",
    "PER_REPLICA",
    "PER_WORKER",
    "F8_E4M3",  # dtypes of safetensors
    "F8_E5M2",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "SC_PAGE_SIZE",
    "SC_PHYS_PAGES",
    "SHARD_HINT",
    "TASK_INDEX",  # in the manifests that `replicax launch --on k8s` prints
    "STORE_DEREF",
    "TCP_KEEPCNT",
    "TCP_KEEPIDLE",
    "TCP_KEEPINTVL",
    "UNKNOWN_ADDRESS",
    "WITHIN_CLUSTER",
    "IMPORT_FROM",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
    "SUM_BY_NONZERO_WEIGHTS",
    "SUM_OVER_BATCH_SIZE",
    "SUM_OVER_NONZERO_WEIGHTS",
]
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK|TERM|TMPDIR")
QUOTED = re.compile(rf"[\"'](?:{VARIABLE.pattern})[\"']")  # parsing takes long


def is_list_of_names(node: ast.Assign) -> bool:
    """True for ``__all__``, which has names of Python."""
    return ast.unparse(node.targets[0]) == "__all__"


@functools.cache
def variables_in_source() -> set[str]:
    """The names of environment variables in strings of the source."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        if not QUOTED.search(text):
            continue
        tree = ast.parse(text)
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.Assign) and is_list_of_names(node))
        ]
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and VARIABLE.fullmatch(node.value)
            ):
                found.add(node.value)
    return found - {*NOT_VARIABLES}


def test_page_has_exactly_the_environment_variables():
    page = (DOCS / "reference" / "environment_variables.md").read_text()
    documented = {name for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", page) if VARIABLE.fullmatch(name)}
    read_by_others = {"OMPI_MCA_orte_hnp_uri"}
    assert variables_in_source() - documented == set()
    of_ours = {name for name in documented if name.startswith("REPLICAX_")}
    assert of_ours - variables_in_source() - read_by_others == set()


def test_the_page_shows_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    page = (DOCS / "reference" / "command_line.md").read_text()
    assert "launch" in commands
    assert [name for name in commands if f"<!-- make pages: command replicax {name} -->\n" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_the_page_has_every_extra(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / page).read_text()
    for_users = [name for name in extras if name not in ("test", "dev")]
    assert [name for name in for_users if f"`{name}`" not in text] == []


def test_the_pictures_are_what_the_script_draws(tmp_path):
    script = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    script["Picture"].save.__globals__["FOLDER"] = tmp_path
    for name in ("batch", "variable", "step", "scheduled_function", "layers"):
        script[name]()
        assert (tmp_path / f"{name}.svg").read_text() == (DOCS / "pictures" / f"{name}.svg").read_text(), name


def test_the_files_that_pages_about_the_code_name_are_there():
    pages = (
        ROOT / "CONTRIBUTING.md",
        DOCS / "architecture.md",
        *sorted((DOCS / "explanation").rglob("*.md")),
    )
    places = ("src", "tests", "tools", "docs")
    there = {f"/{path.relative_to(ROOT)}" for place in places for path in (ROOT / place).rglob("*")}
    there |= {f"/{path.name}" for path in ROOT.iterdir()}
    gone = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(r"`([\w./]+(?:\.(?:py|toml)|/))`", page.read_text())
        if not any(path.endswith("/" + name.rstrip("/")) for path in there)
    ]
    assert gone == []


def test_lines_have_at_most_120_characters():
    elsewhere = (DOCS / "migrating_from_tensorflow.md", DOCS / "reference" / "migration_report.md")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    wide = [
        f"{page.relative_to(ROOT)}:{number}, without its blocks"
        for page in pages
        if page not in elsewhere
        for number, line in enumerate(BLOCK.sub("", page.read_text()).splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")  # a row of a table is one line
    ]
    assert wide == []


def test_nothing_is_defined_as_the_one_that():
    """A definition says the noun: "the worker that saves", not "the one that saves"."""
    wrong = re.compile(r"\bthe ones?\s+(?:#\s+)?(?:that|which|who|whose|in which)\b", re.IGNORECASE)
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in sorted(files)
        for text in [path.read_text()]
        for match in wrong.finditer(text)
    ]
    assert found == []


# The words that the page of the module tf.distribute defines.
WORDS_OF_THE_MODULE = [
    "data parallelism",
    "model parallelism",
    "device",
    "replica",
    "host",
    "worker",
    "synchronous training",
    "asynchronous training",
    "parameter server",
    "mirrored",
    "reduction",
    "all-reduce",
]


def test_glossary_has_the_words_of_tensorflows_module_page_in_order():
    text = (DOCS / "reference" / "glossary.md").read_text()
    sections = text.split("\n## ")[1:]
    entries = [re.findall(r"^- \*\*([^*]+)\*\*", section, re.MULTILINE) for section in sections]
    everywhere = [word for words in entries for word in words]
    assert set(WORDS_OF_THE_MODULE) <= set(entries[0])
    assert entries[0] == sorted(entries[0], key=str.lower)
    assert len(set(everywhere)) == len(everywhere)
