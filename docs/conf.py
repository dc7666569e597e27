"""The documentation site: `sphinx-build -W -b html docs OUT`. Nothing is executed and nothing is downloaded."""

import ast
import importlib
import importlib.metadata
import inspect
import os
from pathlib import Path
import re
import sys
import textwrap

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from latex2mathml import converter
from docutils.parsers.rst import directives
from pygments.lexers import PythonLexer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
ADDRESS = importlib.metadata.metadata('speccascade').get('Home-page')  # of the repository, where it is known
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import options  # noqa: E402
import speccascade  # noqa: E402

project = 'speccascade'
author = 'the authors of speccascade'
copyright = author
version = release = speccascade.__version__

extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', 'sphinx.ext.napoleon']
exclude_patterns = ['_build']
smartquotes_action = 'qe'  # no dashes: --option stays
highlight_language = 'text'  # blocks without a language are commands
default_role = 'literal'  # `name` in a docstring is code, as it is in a page

html_theme = 'sphinx_book_theme'
html_title = 'speccascade'
html_static_path = ['_static']
html_css_files = ['site.css']
html_math_renderer = 'mathml'
# The header has a search button on every page and screen, so that the sidebar needs none.
html_sidebars = {'**': ['navbar-logo.html', 'icon-links.html', 'sbt-sidebar-nav.html']}
html_theme_options = {'show_toc_level': 2, 'use_download_button': False}

myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_custom_sections = [('Attributes', 'params_style')]
napoleon_use_rtype = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 88

nitpicky = True  # a role that names nothing is an error; annotations may name types of other libraries
nitpick_ignore_regex = [('py:class', '.*'), ('py:exc', 'RunError')]


def skip_member(app, what, name, member, skip, options):
  """Leave out what every dataclass of flax and every NamedTuple has."""
  field = (member.__doc__ or '').startswith('Alias for field number')
  return True if field or name == 'replace' else None


def add_fields(app, what, name, obj, options, lines):
  """Document the fields of a dataclass by the comments behind them."""
  if what != 'class' or 'Attributes:' in lines:
    return
  try:
    source = textwrap.dedent(inspect.getsource(obj))
  except OSError:  # a class that was not made by a class statement
    return
  fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
  behind = [source.split('\n')[node.end_lineno - 1].encode()[node.end_col_offset :].decode() for node in fields]
  comments = [text.partition('# ')[2] for text in behind]
  if any(comments):
    lines += ['Attributes:', *(f'  {node.target.id}: {text}' for node, text in zip(fields, comments)), '']


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


def link_repository(app, docname, source):
  """Let links to experiments lead to the repository's page, or be their paths where no page is known."""
  to = r'[\1](' + f'{ADDRESS}/blob/main/' + r'\2)' if ADDRESS else r'`\2`'
  source[0] = re.sub(r'\[([^]]+)\]\((?:\.\./)+(experiments/[^)]+)\)', to, source[0])


class Known(SphinxDirective):
  """The entries of what a module knows by name, as its function `known` returns it: `.. known:: speccascade.rules`."""

  required_arguments = 1
  option_spec = {
    'within': directives.unchanged,  # the module in which they are, below that of the argument
    'but': directives.unchanged,  # names that are left out
    'summary': directives.flag,  # list them, for their entries are elsewhere
  }

  def run(self):
    """Return what autodoc, or autosummary, makes of each."""
    module = importlib.import_module(self.arguments[0])
    within = '.'.join([self.arguments[0], *self.options.get('within', '').split()])
    left_out = self.options.get('but', '').split()
    found = {n: x for n, x in module.known().items() if n not in left_out and x.__module__.startswith(within)}
    if 'summary' in self.options:
      text = ['.. autosummary::', '   :nosignatures:', '', *(f'   {name}' for name in found)]
    else:
      kind = {name: 'class' if inspect.isclass(x) else 'function' for name, x in found.items()}
      text = [f'.. auto{kind[name]}:: {self.arguments[0]}.{name}' for name in found]
    return self.parse_text_to_nodes('\n'.join(text))


class Flags(Directive):
  """The table of a command's options."""

  required_arguments, optional_arguments = 1, 1
  read = staticmethod(options.flags)

  def run(self):
    """Return the nodes of the table."""
    container = nodes.container()
    lines = StringList(options.table(*self.read(*self.arguments)), source=self.arguments[0])
    self.state.nested_parse(lines, self.content_offset, container)
    return container.children


class Settings(Flags):
  """The table of what a name of a config takes."""

  read = staticmethod(options.settings)


def visit_math(self, node):
  """Write a formula as MathML, which browsers show without a script."""
  self.body.append(converter.convert(node.astext()))
  raise nodes.SkipNode


def visit_displayed_math(self, node):
  """Write a formula that has a line of its own."""
  self.body.append(f'<div class="formula">{converter.convert(node.astext(), display="block")}</div>')
  raise nodes.SkipNode


def setup(app):
  """Connect the hooks above."""
  app.add_directive('known', Known)
  app.add_lexer('gin', PythonLexer)
  app.add_directive('flags', Flags)
  app.add_directive('settings', Settings)
  app.add_html_math_renderer('mathml', (visit_math, None), (visit_displayed_math, None))
  app.connect('autodoc-skip-member', skip_member)
  app.connect('autodoc-process-docstring', add_fields, priority=400)  # before napoleon reads it
  app.connect('source-read', link_repository)
  app.connect('doctree-resolved', link_names)
