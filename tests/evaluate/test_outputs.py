"""What only draws the results costs none of them."""

import made
import pytest

from speccascade.evaluate import report, rundir
from speccascade.evaluate.report import drawing
from speccascade.host import buckets, disk
from speccascade.host.errors import RunError


def fail(*_):
  raise ValueError('no such font\nand more')


def test_a_chart_or_a_scalar_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
  (tmp_path / 'tensorboard').write_text('in the way')
  monkeypatch.setattr(drawing, 'draw', fail)
  report.write(made.cascades((0.0,)), tmp_path)
  first, second = capsys.readouterr().err.splitlines()
  assert first.startswith('warning: tensorboard/ is not all written (') and 'report and all numbers are' in first
  assert second.startswith('warning: curves/ is not all written (no such font);')
  assert {'results.json', 'summary.csv'} <= {p.name for p in tmp_path.iterdir()}
  assert 'Summary, T = 0' in (tmp_path / 'report.html').read_text()


def test_every_chart_is_written_as_svg_and_png_and_in_the_page(tmp_path):
  report.write(made.cascades((1.0,)), tmp_path)
  files = list((tmp_path / 'curves').iterdir())
  names = ('quality_latency', 'quality_deferral', 'acceptance', 'speed_by_parameter', 'prediction')
  assert {p.name for p in files} >= {f'{name}_T1.{kind}' for name in names for kind in ('svg', 'png')}
  for path in files:
    content = path.read_bytes()
    assert content.startswith(b'\x89PNG' if path.suffix == '.png' else b'<?xml') and len(content) > 3000
  assert (tmp_path / 'report.html').read_text().count('<svg') == len(files) / 2


def test_what_a_bucket_does_not_permit_is_found_before_anything_is_measured(monkeypatch):
  pytest.importorskip('upath')
  folder = buckets.path('memory://outputs/run')
  with rundir.locked(folder):
    pass
  assert disk.names(folder) == ['lock']

  def forbid(*_):
    raise PermissionError('403: storage.objects.delete is denied')

  monkeypatch.setattr(buckets, 'remove', forbid)
  with pytest.raises(RunError, match=r'outputs/run cannot be written, read and cleared: 403: .* permit all three, or'):
    with rundir.locked(folder):
      pass
