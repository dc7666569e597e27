"""What only draws the results costs none of them."""

import made
import pytest

from speccascade.evaluate import outputs, plots, rundir
from speccascade.host import storage
from speccascade.host.errors import RunError


def test_a_plot_or_a_scalar_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
  (tmp_path / 'tensorboard').write_text('in the way')
  monkeypatch.setattr(plots, 'write', lambda *_: (_ for _ in ()).throw(ValueError('no such font\nand more')))
  outputs.write(made.cascades((0.0,)), tmp_path)
  first, second = capsys.readouterr().err.splitlines()
  assert first.startswith('warning: tensorboard/ is not all written (') and 'report and all numbers are' in first
  assert second.startswith('warning: curves/ is not all written (no such font);')
  assert {'results.json', 'summary.csv', 'report.html'} <= {p.name for p in tmp_path.iterdir()}


def test_what_a_bucket_does_not_permit_is_found_before_anything_is_measured(monkeypatch):
  pytest.importorskip('upath')
  folder = storage.resolve('memory://outputs/run')
  with rundir.locked(folder):
    pass
  assert storage.names(folder) == ['lock']

  def forbid(*_):
    raise PermissionError('403: storage.objects.delete is denied')

  monkeypatch.setattr(storage, 'remove', forbid)
  with pytest.raises(RunError, match=r'outputs/run cannot be written, read and cleared: 403: .* permit all three, or'):
    with rundir.locked(folder):
      pass
