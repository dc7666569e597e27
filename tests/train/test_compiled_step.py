"""A training step compiled for TPUs that are not there: what it needs of a chip, and its collectives."""

import dataclasses
import json
import pathlib

import jax
from matching import having, says
import pytest

from speccascade.models.t5 import T5, T5Config
from speccascade.planning import aot
from speccascade.train import __main__, compiled
from speccascade.train.jobs import Job
from speccascade.train.loop import Settings
from speccascade.train.losses import Distillation
from speccascade.train.optimizers import Optimizer

FOLDER = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'train'
NET = T5(T5Config(4096, 512, 8, 64, 1024, encoder_layers=2, decoder_layers=2), scan=True)
SETTINGS = Settings(
  steps=10, batch_size=8, widths=((32, 16),), optimizer=Optimizer('adafactor', clip=0), microbatches=2, remat=True
)


def test_a_step_for_tpus_shards_its_state_and_gathers_no_weights():
  pytest.importorskip('libtpu')
  devices = aot.describe('v5e:2x2').devices
  sizes = {}
  for model in (1, 4):
    mesh = aot.Placement(devices, {'data': 4 // model, 'model': model}).mesh
    sizes[model] = compiled.measure(compiled.compile_step(NET, SETTINGS, mesh, rules='sharded'))
  total = sum(4 * x.size for x in jax.tree.leaves(NET.param_shapes()))
  assert total <= sizes[1]['state'] < 1.1 * total and total / 4 <= sizes[4]['state'] < 1.1 * total / 4
  assert sizes[4]['total'] < sizes[1]['total']
  smallest_kernel = 4 * NET.config.embed_dim**2
  for size in sizes.values():
    assert size['collectives']['all-reduce']['times'] >= 2 * 2 * 2  # of two layers forward and backward, twice
    assert size['collectives'].get('all-gather', {'largest': 0})['largest'] < smallest_kernel / 2


@pytest.mark.full
def test_a_step_that_distils_holds_teacher_and_companion(tmp_path):
  net = T5(T5Config(4096, 16, 2, 8, 32, encoder_layers=1, decoder_layers=1))
  settings = dataclasses.replace(SETTINGS, distillation=Distillation(companion=0.5), remat=False)
  jobs = [Job('large', NET, [], SETTINGS), Job('plain', net, [], SETTINGS)]
  companion = tmp_path / 'companion'
  jobs.append(Job('draft', net, [], settings, teacher='large', companion=str(companion)))
  with pytest.raises(ValueError, match=having('draft', '--compile', str(companion), 'no config.json')):
    list(compiled.report(jobs[2], jax.devices()[:1], jobs))
  companion.mkdir()
  config = dict(model_type='t5', vocab_size=4096, d_model=512, num_heads=8, d_kv=64, d_ff=1024, num_layers=2)
  config |= dict(feed_forward_proj='gated-gelu', tie_word_embeddings=False)
  (companion / 'config.json').write_text(json.dumps(config))
  state = {}
  for job in jobs[1:]:
    line = next(x for x in compiled.report(job, jax.devices()[:1], jobs) if x.startswith('a chip'))
    state[job.name] = float(line.split('state ')[1].split(' GiB')[0]) * compiled.GIB
  both = 2 * sum(4 * x.size for x in jax.tree.leaves(NET.param_shapes()))
  assert both > 0.05 * compiled.GIB  # of which the lines have two digits
  assert state['draft'] - state['plain'] == pytest.approx(both, abs=0.01 * compiled.GIB)


def test_a_command_compiles_or_trains(capsys):
  config = f'--gin_file={FOLDER / "embedded"}.gin'
  for more in ([], ['--out=x', '--compile=v5e:2x2']):
    assert __main__.main([config, *more]) == 1
    assert says(capsys.readouterr().err, '--out', '--compile')


def test_a_job_to_compile_has_a_network_and_a_mesh_that_divides_it():
  with pytest.raises(ValueError, match=having('batch_size=8', 'microbatches=2', 'data=16')):
    mesh = jax.sharding.AbstractMesh((16, 1), ('data', 'model'))
    compiled.compile_step(NET, SETTINGS, mesh)


@pytest.mark.long
def test_a_step_of_t5_xl_fits_a_chip_of_v5e_4x4(capsys):
  pytest.importorskip('libtpu')
  macros = dict(SIZE='xl', SCAN=True, REMAT=True, MICROBATCHES=32, MESH={'data': 4, 'model': 4})
  macros |= dict(CHECKPOINT='x', TOKENIZER=None)
  bound = [f'--gin.{key}={value!r}' for key, value in macros.items()]
  assert __main__.main([f'--gin_file={FOLDER / "cnn_dailymail"}.gin', '--compile=v5e:4x4', *bound]) == 0
  out = capsys.readouterr().out
  assert says(out, '2,849,757,184 parameters', "'data': 4, 'model': 4")
  total = float(out.split('total ')[1].split(' GiB')[0])
  assert total < aot.CHIPS['v5e'].memory
