"""The documentation site: sphinx-build -nW -c docs . docs/build.

The root is the repository, so that pages link to each other, to results and to files by paths that
also work in an editor and on a code host. Nothing is fetched.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

project = "dlion"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "generated",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "results/**.md",
    "sweep/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "docs/build", "build", "dist", "outputs", "runs", "wandb", "src", "tests"]

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "dlion"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 4  # links to headings, as code hosts write them
myst_enable_extensions = ["colon_fence", "dollarmath"]
suppress_warnings = ["myst.header"]  # pages of results may skip a level

autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_param = False  # it takes one name, and some of our entries describe several
nitpick_ignore_regex = [("py:.*", r"(abc|collections|torch)\..*|TrainingFailed|collect")]

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=(#[^)\s]*)?\))")
OPENED = ("README.md", "runs.jsonl")  # what a link to a folder leads to here


def open_folders(app: Sphinx, docname: str, content: list[str]) -> None:
    """Let links to folders lead to the page in them, or to the data."""
    folder = app.env.doc2path(docname).parent

    def opened(link: re.Match[str]) -> str:
        for name in OPENED if (folder / link[0]).is_dir() else ():
            if (folder / link[0] / name).exists():
                return f"{link[0].rstrip('/')}/{name}"
        return link[0]

    content[0] = LINK.sub(opened, content[0])


def add_entrance(app: Sphinx, failed: Exception | None) -> None:
    """Lead from the folder of the site to its first page."""
    if failed is None and app.builder.format == "html":
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)


def write_mathml(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script or a font of ours."""
    block = node.tagname == "math_block"
    formula = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    raise SkipNode


def setup(app: Sphinx) -> None:
    """Connect all of these."""
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.connect("source-read", open_folders)
    app.connect("build-finished", add_entrance)
