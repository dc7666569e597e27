"""The report is one file that loads nothing, and lets no text of the data become markup."""

import base64
import dataclasses
from html.parser import HTMLParser
import re
import shutil
import subprocess

import made
from made import point
import pytest

from speccascade.evaluate.report import charts, drawing, tables
from speccascade.evaluate.report import page as pages

EVIL = '</script><script>alert("x")</script><img src=http://example.org/x onerror=alert(1)> & \'"'


class Markup(HTMLParser):
  """The elements of a page, with what a browser would load, and its text."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.loaded, self.handlers, self.text = [], [], [], []
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    self.loaded += [v for k, v in attrs if k in ('src', 'href', 'srcset', 'data', 'action', 'xlink:href')]
    self.handlers += [k for k, _ in attrs if k.startswith('on')]

  def handle_data(self, data):
    self.text.append(data)


def written(results):
  return pages.page(results, list(map(drawing.draw, charts.charts(results))))


@pytest.fixture(scope='module')
def page():
  return written(made.cascades((0.0,)))


def test_a_metric_that_judges_nothing_is_no_quality_to_reach():
  some = point('target only', quality=28.0, ratio=1.0), point('a', 0.1, 28.0, 1.5), point('a', 0.2, 28.0, 1.2)
  words = [dataclasses.replace(p, quality={'words': 28.0}) for p in some]
  results = made.results(words, metric='words', metrics=['words'])
  assert [t['title'] for t in tables.tables(results)] == ['Summary, T = 0']
  assert [c.section for c in charts.charts(results)] == ['Parameters']


# ---- the page ----


def test_nothing_is_loaded_from_anywhere(page):
  markup = Markup(page)
  assert all(x.startswith(('data:', '#')) for x in markup.loaded)
  assert not markup.handlers and '@import' not in page and 'url(' not in page
  outside = re.sub(r'http://www\.w3\.org/2000/svg', '', page)  # a name, not an address
  assert 'http://' not in outside and 'https://' not in outside


def test_every_section_and_number_is_there(page):
  markup = Markup(page)
  text = ' '.join(markup.text)
  for name in ('Quality and time', 'Quality by deferral', 'Acceptance', 'How it was run'):
    assert name in text
  ids = [a['id'] for tag, a in markup.tags if tag == 'section']
  assert [a['href'][1:] for tag, a in markup.tags if tag == 'a'] == ids
  for expected in ('28.60', '1.40', 'α = 0.3', 'python -m speccascade.run', 'jax 0.10.2'):
    assert expected in text


def test_every_token_has_the_class_of_its_source(page):
  tokens = [a['class'] for tag, a in Markup(page).tags if a.get('class', '').startswith('t ')]
  assert tokens[-5:] == ['t drafter', 't drafter', 't residual', 't bonus', 't verifier']


def test_every_chart_is_the_image_of_its_file_with_what_is_on_it(page):
  pictures = [a for tag, a in Markup(page).tags if tag == 'img']
  drawings = [drawing.draw(chart) for chart in charts.charts(made.cascades((0.0,)))]
  files = [drawn.svg for drawn in drawings]
  assert [base64.b64decode(a['src'].partition('base64,')[2]) for a in pictures] == files and len(files) == 4
  assert any('time relative to target only' in a['alt'] for a in pictures)


def test_the_verdict_stands_above_the_sections(page):
  text = ' '.join(Markup(page).text)
  (verdict,) = tables.verdicts(made.cascades((0.0,)))
  assert verdict.startswith('T = 0: SpecCascade [')
  assert text.index(verdict) < text.index('Quality and time')


def test_charts_are_dark_where_the_page_is_and_a_table_says_that_it_has_more_columns(page):
  dark = ''.join(re.findall(r'@media \(prefers-color-scheme: dark\) \{.*?\n\}', page, re.DOTALL))
  assert re.search(r'\.chart \{ background: var\(--card\)', dark) and re.search(r'\.chart img \{[^}]*invert', dark)
  scroll = re.search(r'\.scroll \{.*?\n\}', page, re.DOTALL)[0]
  assert scroll.count('local') == scroll.count('no-repeat scroll') == 2


def test_every_id_is_there_once_and_every_reference_leads_to_one(page):
  tags = Markup(page).tags
  ids = [a['id'] for _, a in tags if 'id' in a]
  assert len(ids) == len(set(ids)) and {a['href'][1:] for tag, a in tags if tag == 'a'} <= set(ids)


def test_text_of_the_data_never_becomes_markup():
  trace = made.trace(EVIL, EVIL, prompt=EVIL, target=[EVIL], tokens=[dict(text=EVIL, source=EVIL)])
  points = [point('target only', quality=28.0, ratio=1.0), point(EVIL, 0.1, 29.0, 1.5, counts=made.counts(0.5, 0.2))]
  results = made.results(
    points, name=EVIL, task=EVIL, models=[EVIL, EVIL], command=EVIL, environment={EVIL: EVIL}, traces=[trace]
  )
  page = written(results)
  markup = Markup(page)
  assert [a.get('type') for tag, a in markup.tags if tag == 'script'] == [None]
  assert not markup.handlers and all(a['src'].startswith('data:') for tag, a in markup.tags if tag == 'img')
  assert page.count('alert(1)') > 10
  assert '<img src=http' not in page


def test_a_sorted_table_has_its_values_as_they_are(page):
  cells = [a['data-value'] for tag, a in Markup(page).tags if tag == 'td']
  assert '28.1' in cells and '' in cells


def test_the_smallest_results_make_a_page():
  results = made.results([point('target only')], environment=None, traces=None, command='', tables=None)
  text = ' '.join(Markup(written(results)).text)
  assert 'target only' in text and 'Outputs, token' not in text and 'Quality and time' not in text


ACTIONS = """<script>
document.querySelector('th.n button').click();
</script>"""


def test_it_answers_in_a_browser_without_an_error(tmp_path):
  browser = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
  if browser is None:
    pytest.skip('no chromium here')
  path = tmp_path / 'report.html'
  path.write_text(written(made.cascades((0.0,))) + ACTIONS)
  command = [
    browser,
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--enable-logging=stderr',
    '--virtual-time-budget=2000',
    f'--user-data-dir={tmp_path / "profile"}',
    '--dump-dom',
    path.as_uri(),
  ]
  out = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert 'CONSOLE' not in out.stderr
  tags = Markup(out.stdout).tags
  assert [a['aria-sort'] for tag, a in tags if 'aria-sort' in a] == ['descending']
