"""The documentation site: `sphinx-build -W -b html docs OUT`. Nothing is executed and nothing is downloaded."""

import os
from pathlib import Path
import sys

from docutils import nodes
from pygments.lexers import PythonLexer
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import speccascade  # noqa: E402

project = 'speccascade'
author = 'the authors of speccascade'
copyright = author
version = release = speccascade.__version__

extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', 'sphinx.ext.mathjax', 'sphinx.ext.napoleon']
exclude_patterns = ['_build']
default_role = 'literal'  # `name` in a docstring is code, as it is in a page

html_theme = 'sphinx_book_theme'
html_title = 'speccascade'
html_theme_options = {'show_toc_level': 2, 'use_download_button': False}

myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_type_aliases = {'Array': 'Array', 'ArrayLike': 'ArrayLike', 'Params': 'Params', 'Cache': 'Cache'}
autodoc_default_options = {'exclude-members': 'replace'}  # what flax.struct adds to every dataclass
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 88

nitpicky = True  # a role that names nothing is an error; annotations may name types of other libraries
nitpick_ignore_regex = [('py:class', '.*')]


def skip_member(app, what, name, member, skip, options):
  """Leave out what has no docstring of its own: the fields of a NamedTuple."""
  return True if (member.__doc__ or '').startswith('Alias for field number') else None


def link_names(app, doctree, docname):
  """Link each code span that names a documented object, as `methods.cos` or `speccascade.load(path)`."""
  objects = app.env.domains['py'].objects
  for node in list(doctree.findall(nodes.literal)):
    name = node.astext().split('(')[0].removeprefix('speccascade.')
    found = objects.get(f'speccascade.{name}')
    inside = isinstance(node.parent, (nodes.reference, nodes.title))
    if found and not inside:
      link = make_refnode(app.builder, docname, found.docname, found.node_id, node.deepcopy())
      node.replace_self(link)


def setup(app):
  """Connect the two hooks above."""
  app.add_lexer('gin', PythonLexer)
  app.connect('autodoc-skip-member', skip_member)
  app.connect('doctree-resolved', link_names)
