"""The report states the findings, in one file that loads nothing and lets no text of the data become markup."""

import base64
import dataclasses
from html.parser import HTMLParser
import re
import shutil
import subprocess

import made
from made import point
import pytest

from speccascade.evaluate.report import charts, drawing, tables, verdict
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


# ---- the finding ----


def test_the_finding_is_the_fastest_setting_with_the_large_models_quality():
  results = made.cascades()
  findings = verdict.findings(results)
  assert [f[:2] for f in findings] == [('T = 0', 'yes'), ('T = 1', 'yes')]
  best, how = findings[0][2].split(' reaches ')
  assert best == 'SpecCascade [OPT] at α = 0.1'
  assert how == "the large model's BLEU (28.60 against 28.10) at 1.40× [1.36 … 1.44] its speed."


LARGE = point('target only', quality=28.0, ratio=1.0)
UNTIMED = point('target only', quality=28.0)
ALIKE = [point('b', a, 28.0, 1.3, counts=made.counts(0.5)) for a in (0.1, 0.3, 0.5)]
WORSE = [point('a', 0.1, 27.0, 2.0), point('a', 0.2, 26.0, 3.0), point('draft only', quality=29.0, ratio=4.0)]
NEAREST = "open: Nothing reaches the large model's BLEU; nearest is a at α = 0.1 (27.90 against 28.00, too near to tell"


def gain(quality, low, high, ratio=None):
  """Return a setting whose gain in quality has this interval."""
  return point('a', 0.1, quality, ratio, quality_gain_ci={'bleu': [low, high]})


def timed(ratio, low, high):
  """Return a setting of the large model's quality whose speed-up has this interval."""
  return point('b', quality=28.0, latency=dict(ratio=ratio, ratio_ci=[low, high]))


def outputs(**more):
  """Return the large model and a setting of its quality whose outputs are so long, and so often cut off."""
  return [
    dataclasses.replace(LARGE, counts=made.counts(0.0)),
    point('a', 0.1, 28.0, 1.5, counts=made.counts(0.5, **more)),
  ]


FINDINGS = [
  ([LARGE, point('b', quality=28.0, ratio=0.8)], 'no: Nothing pays: the best, b reaches', 'at 0.80×'),
  ([LARGE, timed(1.02, 0.98, 1.06)], 'open: No gain that the measurement can tell', 'at 1.02× [0.98 … 1.06]'),
  ([LARGE, timed(1.6, 0.95, 2.4)], 'open: No gain that the measurement can tell', 'at 1.60× [0.95 … 2.40]'),
  ([LARGE, timed(0.9, 0.7, 1.2)], 'open: No gain that the measurement can tell', 'at 0.90×'),
  ([LARGE, timed(0.9, 0.8, 1.0)], 'no: Nothing pays', 'at 0.90×'),
  ([LARGE, point('b', quality=28.0, latency=dict(ratio=1.5))], 'open: b', 'at 1.50× its speed; timed on too little'),
  ([LARGE, gain(28.5, -0.4, 1.3, 1.5)], 'yes: a', '(28.50 against 28.00, too near to tell apart) at 1.50×'),
  ([LARGE, gain(28.5, 0.1, 0.9, 1.5)], 'yes: a', '(28.50 against 28.00, more than chance) at 1.50×'),
  ([LARGE, point('a', 0.1, 28.5, 1.5)], 'yes: a', '(28.50 against 28.00) at 1.50×'),
  ([LARGE, gain(27.9, -0.6, 0.4, 2.0)], NEAREST, 'apart), at 2.00× its speed.'),
  ([LARGE, *WORSE], 'no: Nothing reaches', 'a at α = 0.1 (27.00 against 28.00), at 2.00×'),
  ([LARGE, *ALIKE], 'yes: b at α = 0.1, 0.3, 0.5 reaches', 'at 1.30×'),
  (outputs(length=26.0, cut_off=0.1), 'yes: a', 'its speed, with outputs 30% longer, 10% of them cut off.'),
  (outputs(length=15.0), 'yes: a', 'its speed, with outputs 25% shorter.'),
  (outputs(length=20.2), 'yes: a', 'its speed.'),
  ([UNTIMED, gain(27.0, -2.0, 1.0)], 'open: a', '27.00 against 28.00 of target only, too near to tell apart. No times'),
  ([UNTIMED, point('a', 0.1, 35.0)], 'open: a', '35.00 against 28.00 of target only. No times'),
  ([LARGE], 'open: ', 'nothing to compare'),
  ([point('target only'), point('a', 0.1)], 'open: ', 'Neither quality nor time'),
  ([LARGE, point('a', 0.1, ratio=2.0)], 'open: ', 'of target only alone'),
]


@pytest.mark.parametrize('points, start, part', FINDINGS)
def test_the_finding_says_what_was_measured_and_no_more(points, start, part):
  text = ': '.join(verdict.finding(made.results(points), points))
  assert text.startswith(start) and part in text


def test_a_metric_that_judges_nothing_is_no_quality_to_reach():
  some = LARGE, point('a', 0.1, 28.0, 1.5), point('a', 0.2, 28.0, 1.2)
  words = [dataclasses.replace(p, quality={'words': 28.0}) for p in some]
  results = made.results(words, metric='words', metrics=['words'])
  assert verdict.finding(results, words) == (
    'yes',
    'a at α = 0.1 runs at 1.50× [1.46 … 1.54] the speed of target only.',
  )
  untimed = [dataclasses.replace(p, latency=None) for p in words]
  assert verdict.finding(results, untimed) == ('open', 'Neither quality nor time was measured.')
  assert [t['title'] for t in tables.tables(results)] == ['Summary, T = 0']
  assert [c.section for c in charts.charts(results)] == ['Parameters']


def test_ensembles_are_compared_by_speed_alone():
  points = [
    point('ensemble', quality=28.0, ratio=1.0),
    point('CoS', [5, 1], 27.9, 1.5, parameter='blocks'),
    point('target only', quality=27.0, ratio=3.0),
  ]
  assert verdict.finding(made.results(points, reference='ensemble'), points) == (
    'yes',
    'CoS at γ = (5, 1) runs at 1.50× [1.46 … 1.54] the speed of ensemble.',
  )


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
  for name in ('Quality and time', 'Quality by deferral', 'Acceptance', 'Prediction and measurement', 'How it was run'):
    assert name in text
  ids = [a['id'] for tag, a in markup.tags if tag == 'section']
  assert [a['href'][1:] for tag, a in markup.tags if tag == 'a'] == ids
  for expected in ('28.60', '1.40', 'α = 0.3', 'python -m speccascade.run', 'jax 0.10.2'):
    assert expected in text


def test_every_token_says_its_source_and_its_chances(page):
  tokens = [a for tag, a in Markup(page).tags if tag == 'span' and a.get('tabindex') == '0']
  assert len(tokens) == 10
  assert [t['class'] for t in tokens[:5]] == ['t drafter', 't drafter', 't residual', 't bonus', 't verifier']
  assert tokens[0]['data-tip'] == 'drafter\nq 0.5, p 0.8' and tokens[1]['data-tip'] == 'drafter\nq 0.45, p 0.8, π 0.75'


def test_every_chart_is_the_image_of_its_file_with_what_is_on_it(page):
  pictures = [a for tag, a in Markup(page).tags if tag == 'img']
  drawings = [drawing.draw(chart) for chart in charts.charts(made.cascades((0.0,)))]
  files = [content for drawn in drawings for content in drawn.files.values()]
  assert [base64.b64decode(a['src'].partition('base64,')[2]) for a in pictures] == files and len(files) == 5
  assert any('time relative to target only' in a['alt'] for a in pictures)


def test_every_id_is_there_once_and_every_reference_leads_to_one(page):
  tags = Markup(page).tags
  ids = [a['id'] for _, a in tags if 'id' in a]
  assert len(ids) == len(set(ids)) and {a['href'][1:] for tag, a in tags if tag == 'a'} <= set(ids)


def test_text_of_the_data_never_becomes_markup():
  trace = made.trace(EVIL, EVIL, prompt=EVIL, target=[EVIL], tokens=[dict(text=EVIL, source=EVIL, q=0.5, p=None, pi=1)])
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
  assert 'nothing to compare' in text and 'Outputs, token' not in text and 'Quality and time' not in text


ACTIONS = """<script>
const token = document.querySelector('.t[data-tip]');
token.closest('details').open = true;
token.dispatchEvent(new PointerEvent('click', {pointerType: 'touch', bubbles: true}));
document.body.dataset.tapped = tip.textContent;
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
  (body,) = [a for tag, a in tags if tag == 'body']
  assert body['data-tapped'].startswith('drafter\nq 0.5')
  assert [a['aria-sort'] for tag, a in tags if 'aria-sort' in a] == ['descending']
