"""The API reference is made of the docstrings: sphinx-build -nW docs docs/build."""

from docutils.nodes import Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dlion.optim import METHODS

project = "dlion"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme_options = {"page_width": "70rem", "body_max_width": "none"}
html_show_copyright = False
html_show_sourcelink = False
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_param = False  # it takes one name, and some of our entries describe several
nitpick_ignore_regex = [("py:.*", r"(abc|collections|torch)\..*|TrainingFailed")]


class Methods(SphinxDirective):
    """``.. methods::``: the class of each method, in the order of METHODS."""

    def run(self) -> list[Node]:
        names = {method.home.partition(".")[2]: [] for method in METHODS.values()}
        for name, method in METHODS.items():
            names[method.home.partition(".")[2]].append(f"``{name}``: {method.summary}")
        lines = []
        for cls, called in names.items():
            lines += [f".. autoclass:: {cls}", "", *(f"   | {line}" for line in called), ""]
        return self.parse_text_to_nodes(StringList(lines, source="METHODS"))


def setup(app: Sphinx) -> None:
    """Add the directive."""
    app.add_directive("methods", Methods)
