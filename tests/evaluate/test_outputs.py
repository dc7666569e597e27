"""What only draws the results costs none of them."""

import made
from matching import having, says
import pytest

from speccascade.evaluate import report, rundir
from speccascade.evaluate.report import drawing
from speccascade.host import storage
from speccascade.host.errors import RunError


def fail(*_, **__):
  raise ValueError('no such font\nand more')


def test_a_chart_or_a_scalar_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
  (tmp_path / 'tensorboard').write_text('in the way')
  monkeypatch.setattr(drawing, 'draw', fail)
  report.write(made.cascades((0.0,)), tmp_path, ['tensorboard'])
  first, second = capsys.readouterr().err.splitlines()
  assert first.startswith('warning: ') and 'tensorboard/' in first
  assert second.startswith('warning: ') and says(second, 'curves/', 'no such font')
  assert {'results.json', 'summary.csv', 'report.html'} <= {p.name for p in tmp_path.iterdir()}


def test_pngs_and_scalars_are_written_on_request(tmp_path):
  results = made.results([made.point('target only', quality=28.0, ratio=1.0), made.point('a', 0.1, 27.0, 1.2)])
  for extra in ([], ['png', 'tensorboard']):
    folder = tmp_path / str(len(extra))
    folder.mkdir()
    report.write(results, folder, extra)
    assert {p.name for p in folder.iterdir()} - {'curves'} >= {'results.json', 'report.html'}
    assert {p.suffix for p in (folder / 'curves').iterdir()} == {'.svg'} | ({'.png'} if extra else set())
    assert len(list(folder.glob('tensorboard/events.out.tfevents.*'))) == bool(extra)


def test_a_bucket_without_permission_is_refused_before_anything_is_measured(monkeypatch):
  pytest.importorskip('upath')
  folder = storage.resolve('memory://outputs/run')
  with rundir.locked(folder):
    pass
  assert storage.names(folder) == ['lock']

  def forbid(*_):
    raise PermissionError('403: storage.objects.delete is denied')

  monkeypatch.setattr(storage, 'remove', forbid)
  with pytest.raises(RunError, match=having('outputs/run', '403')), rundir.locked(folder):
    pass
