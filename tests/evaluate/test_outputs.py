"""What only draws the results costs none of them."""

import dataclasses

import made
from matching import having, says
import pytest

from speccascade.evaluate import report, rundir
from speccascade.evaluate.report import drawing
from speccascade.evaluate.report.points import PointResult
from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir


def fail(*_, **__):
  raise ValueError('no such font\nand more')


def test_a_chart_that_cannot_be_drawn_is_a_warning(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(drawing, 'draw', fail)
  report.write(made.cascades((0.0,)), tmp_path)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('warning: ') and says(line, 'curves/', 'no such font')
  assert {'results.json', 'summary.csv', 'report.html'} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.full
def test_names_may_have_any_signs(tmp_path, capsys):
  names = ['{', '{0}', '{ratio}', '%s', '$x', '<b>', '|']
  for name in names:
    some = [made.point('target only', quality=28.0, ratio=1.0), made.point(name, 0.1, 28.0, 1.6)]
    some += [made.point('other', 0.1, 28.5, 1.5)]
    some = [
      dataclasses.replace(p, quality={name: p.quality_of('bleu')}, quality_ci={name: p.interval_of('bleu')})
      for p in some
    ]
    for reference in ('target only', name):
      folder = tmp_path / str(len(list(tmp_path.iterdir())))
      folder.mkdir()
      report.write(made.results(some, reference=reference, metric=name, metrics=[name]), folder)
      assert (folder / 'report.html').exists() and name.replace('|', '') in (folder / 'summary.md').read_text()
  assert 'report' not in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize('part', ['tables.summary', 'page.page', 'formats.as_csv'])
def test_what_shows_the_results_costs_a_warning_and_none_of_them(tmp_path, monkeypatch, capsys, part):
  results = made.cascades((0.0,))
  module, name = part.split('.')
  with monkeypatch.context() as patched:
    patched.setattr(getattr(report, module), name, fail)
    if name == 'as_csv':
      patched.setitem(report.outputs.TEXTS, 'summary.csv', fail)
    report.write(results, tmp_path)
  assert 'warning: ' in (said := capsys.readouterr().err) and 'no such font' in said and 'and more' not in said
  saved = RunDir(tmp_path).read_json('results.json')['points']
  assert list(map(PointResult.from_json, saved)) == results['points']
  assert report.formats.closing([tmp_path], next_steps=False)
  report.write(results, tmp_path)
  assert 'warning: ' not in capsys.readouterr().err and (tmp_path / 'report.html').exists()


def test_a_bucket_without_permission_is_refused_before_anything_is_measured(monkeypatch):
  pytest.importorskip('upath')
  run = RunDir(storage.resolve('memory://outputs/run'))
  with rundir.locked(run):
    pass
  assert run.names() == ['lock']

  def forbid(*_):
    raise PermissionError('403: storage.objects.delete is denied')

  monkeypatch.setattr(type(run.path.fs), 'rm', forbid)
  with pytest.raises(RunError, match=having('outputs/run', '403')), rundir.locked(run):
    pass
