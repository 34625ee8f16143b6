"""How ``make docs`` builds the site: Sphinx, MyST-NB for pages and notebooks, the theme that JAX, NumPy and pandas use.

The build downloads nothing: no inventories of other projects, no fonts, no scripts. Every warning is an error.
"""

import os
import pathlib
import sys

# Before Keras or JAX is imported, here and in the kernels of the notebooks, which inherit the environment.
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))

import importlib.metadata  # noqa: E402

from replicax._src.packaging import home  # noqa: E402

project = "replicax"
author = "The replicax authors"
copyright = author
version = release = importlib.metadata.version("replicax")

repository_url = home.REPOSITORY
html_baseurl = f"{home.SITE}/" if home.SITE else ""

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "public_names",  # this one and the next two: docs/extensions
    "raw_pages",
    "repository_links",
]
exclude_patterns = ["extensions", "pictures", "_templates", "**.ipynb"]  # notebooks: made from their pages
templates_path = ["_templates"]
source_suffix = {".md": "myst-nb"}
root_doc = "index"

# --- Markdown pages and notebooks ---------------------------------------------------------------------------------

myst_enable_extensions = [
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
    "fieldlist",
    "html_image",
    "substitution",
]
myst_heading_anchors = 4  # pages link to headings, as on GitHub: page.md#heading
myst_links_external_new_tab = False
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "docs" / "notebooks")
nb_execution_in_temp = True  # cells write files
nb_execution_raise_on_error = True
nb_execution_timeout = 240  # seconds for a cell
nb_execution_show_tb = True
nb_merge_streams = True  # one block of output for a cell that prints many times

# --- The API, from docstrings -------------------------------------------------------------------------------------

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autosummary_generate = False  # the pages of reference/api list the names; no page is made for each
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Protocols of the class, for code that the class imports.
autodoc_type_aliases = dict.fromkeys(["AnyStrategy", "ExtensibleStrategy"], "replicax.Strategy")
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
viewcode_line_numbers = True

nitpicky = True
nitpick_ignore_regex = [
    # Types of other projects: their pages are on the network, which the build does not use.
    (
        r"py:.*",
        r"(jax|jaxlib|numpy|np|keras|optax|flax|nnx|grain|pyarrow|orbax|ray|tensorboardX|IPython|pytest|_pytest)(\..*)?",
    ),
    # Python's own.
    (
        r"py:.*",
        r"(abc|collections|contextlib|concurrent|datetime|enum|os|pathlib|typing|typing_extensions|types|re)(\..*)?",
    ),
    (
        r"py:.*",
        r"(any|bool|bytes|callable|dict|float|frozenset|int|list|object|set|str|tuple|type|None|Ellipsis)",
    ),
    (r"py:(class|exc|obj)", r"\w*(Error|Exception|Interrupt|Exit)"),
    # Types that signatures name and that nobody imports: protocols, aliases and type variables of replicax's private modules.
    (r"py:.*", r"replicax\._\w+\..*"),
    (r"py:class", r"\w+"),
]

# --- The pages as HTML --------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"replicax {release}"
html_static_path = ["_static"]
html_css_files = ["replicax.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "replicax"},
    "navbar_align": "left",
    "navbar_end": ["version", "theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 7,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "icon_links": [{"name": "Source code", "url": repository_url, "icon": "fa-brands fa-github"}]
    if repository_url
    else [],
}
html_sidebars = {"index": [], "comparison": []}  # pages without others beside them
html_context = {"default_mode": "auto"}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
