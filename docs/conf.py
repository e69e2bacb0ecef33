"""The API reference is made of the docstrings: sphinx-build -nW docs docs/build."""

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
