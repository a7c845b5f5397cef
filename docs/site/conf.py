"""Settings of Sphinx for the site; ``python -m docs.site.build`` calls it on the assembled sources."""

from __future__ import annotations

import importlib

from docutils.nodes import Element, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.writers.html5 import HTML5Translator

import sinklab
from sinklab import __version__

project = "sinklab"
author = "the authors of sinklab"
release = version = __version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = True
# Types of other packages have their documentation elsewhere; whatever is ours must be found.
nitpick_ignore_regex = [(r"py:.*", r"(?!sinklab\.).*")]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # options of groups are not in the text of a signature
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "sinklab"
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # an option keeps its two hyphens
html_copy_source = False
html_show_search_summary = False  # it would be fetched, which a browser refuses to pages from a disk
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": False, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "native"


def _formula(translator: HTML5Translator, node: Element) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=node.tagname == "math_block"))
    raise SkipNode


def _resolved(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """A reference to ours by another of its names; one that exists and has no page is not linked; one that does not fails."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("sinklab."):
        return None
    name = target.removeprefix("sinklab.")
    if name in sinklab._HOMES:
        home = f"{sinklab._HOMES[name]}.{name}"
        return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], home, node, content)
    return content if _exists(target) else None


def _exists(target: str) -> bool:
    """Whether a dotted name leads to something: a module, or what is in one."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def setup(app: Sphinx) -> None:
    """Formulae as MathML, which browsers set by themselves: a script from elsewhere would need a network."""
    app.connect("missing-reference", _resolved)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
