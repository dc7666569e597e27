"""Training: padding has no part in it, a stopped run goes on to the same bits, and it learns."""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small import copies, DECODER, NETWORKS, quiet, settings, T5_NET
from tiers import long_but
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import speccascade
from speccascade import checkpoints, decode, methods, rules, Sampler
from speccascade.checkpoints import hf
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.data.tokenizers import find
from speccascade.decode import lines
from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.models import toy
from speccascade.models.decoder import Decoder
from speccascade.models.t5 import T5, T5Config
from speccascade.train import __main__, data, jobs, loop, losses
from speccascade.train.batches import Batch, batches, collate
from speccascade.train.loop import train
from speccascade.train.losses import Distillation
from speccascade.train.optimizers import Optimizer, slow_queries
from speccascade.types import Model


@functools.partial(jax.jit, static_argnums=0)
def loss(network, params, batch, teacher=None):
  return losses.loss(network, params, batch, teacher)


def init(network, seed=0):
  return jax.jit(network.init)(jax.random.key(seed))


def log_of(run):
  """Return the lines of a run's log."""
  return [json.loads(line) for line in (run / 'log.jsonl').read_text().splitlines()]


def first_pairs(count):
  return list(itertools.islice(copies(), count))


def same(a, b):
  """Tell whether two trees have the same numbers."""
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize('name', long_but(NETWORKS, ['t5']))
def test_padding_and_batch_mates_do_not_change_the_loss(name):
  network = NETWORKS[name]
  params = init(network)
  pairs = [([3, 4, 1], [5, 6, 7, 8, 1]), ([9, 8, 1], [2, 3, 4, 5, 1]), ([3, 4, 5, 6, 7, 8, 9, 1], [2, 1])]
  together, parts = loss(network, params, collate(pairs, (16,)))
  total = count = right = 0.0
  for source, target in pairs:
    alone = Batch(np.array([source]), np.array([len(source)]), np.array([target]), np.array([len(target)]))
    value, one = loss(network, params, alone)
    total, count = total + float(value) * len(target), count + len(target)
    right += float(one['accuracy']) * len(target)
  assert float(together) == pytest.approx(total / count, rel=1e-5)
  assert float(parts['accuracy']) == pytest.approx(right / count, rel=1e-5)


@pytest.mark.parametrize('network', long_but([T5_NET, DECODER], [T5_NET]), ids=['t5', 'decoder'])
def test_teacher_forcing_sees_what_decoding_sees(network):
  model = Model(init(network), network)
  greedy = dict(max_new_tokens=6, sampler=speccascade.Sampler(0.0))
  out = speccascade.decode(speccascade.methods.autoregressive(), [model], [[3, 4, 5]], **greedy)
  tokens = [int(t) for t in out.tokens[0]]
  logits = jax.jit(losses.logits_of, static_argnums=0)(network, model.params, collate([([3, 4, 5], tokens)], (16,)))
  assert logits[0, : len(tokens)].argmax(-1).tolist() == tokens


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
  with storage.lock(tmp_path / 'run' / 'lock', 'wait'):
    with pytest.raises(RunError, match=f'run is in use by process {os.getpid()} on'):
      train(tmp_path / 'run', T5_NET, copies(), settings(), echo=quiet)
  assert [p.name for p in (tmp_path / 'run').iterdir()] == ['lock']


@pytest.mark.parametrize('optimizer', long_but(['adamw', 'adafactor'], ['adamw']))
@pytest.mark.parametrize('network', long_but([T5_NET, DECODER], [DECODER]), ids=['t5', 'decoder'])
def test_training_lowers_the_loss(network, optimizer, tmp_path):
  rate = {'adamw': 1e-2, 'adafactor': 3e-2}[optimizer]
  s = settings(steps=120, batch_size=16, log_every=20, save_every=200, optimizer=Optimizer(optimizer, rate, warmup=5))
  train(tmp_path / 'run', network, copies(), s, echo=quiet)
  log = log_of(tmp_path / 'run')
  assert log[-1]['cross_entropy'] < 0.7 * log[0]['cross_entropy'] and log[-1]['step'] == 120


def test_what_a_killed_run_has_half_written_is_removed(tmp_path):
  out = tmp_path / 'run'
  out.mkdir()
  (out / 'train.json.0a1b2c3d.part').write_text('{')
  train(out, T5_NET, copies(), settings(steps=1), echo=quiet)
  assert not list(out.rglob('*.part')) and (out / 'train.json').exists()


def interrupted():
  """Yield the first pool of batches, then stop as Ctrl-C does."""
  yield from itertools.islice(copies(), 4 * 16)
  raise KeyboardInterrupt


@pytest.mark.full
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
  s = settings(steps=20, save_every=5)
  uninterrupted = train(tmp_path / 'uninterrupted', T5_NET, copies(), s, echo=quiet)
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path / 'stopped', T5_NET, interrupted(), s, echo=quiet)
  printed = []
  resumed = train(tmp_path / 'stopped', T5_NET, copies(), s, echo=lambda text, **_: printed.append(text))
  assert 'going on after step 15 of 20' in printed[0]
  assert same(uninterrupted.params, resumed.params)
  whole, parts = ([{**line, 'seconds': 0} for line in log_of(tmp_path / n)] for n in ('uninterrupted', 'stopped'))
  assert parts == whole and [line['step'] for line in whole] == list(range(2, 21, 2))


@pytest.mark.long
def test_a_run_goes_on_with_its_own_data_and_teacher_only(tmp_path):
  s = settings(steps=20, save_every=3)
  teachers = [Model(init(T5_NET, seed), T5_NET, name='teacher') for seed in (0, 1)]
  run = lambda pairs, teacher: train(tmp_path / 'run', T5_NET, pairs, s, teacher=teacher, echo=quiet)
  with pytest.raises(KeyboardInterrupt):
    run(interrupted(), teachers[0])
  for pairs, teacher, parts in (
    (copies(1), teachers[0], ('other data', '15 steps')),
    (copies(), teachers[1], ('teacher',)),
    (copies(), None, ('teacher', 'None')),
  ):
    with pytest.raises(ValueError, match=having(*parts)):
      run(pairs, teacher)
  file = tmp_path / 'run' / 'train.json'
  content = file.read_text()
  file.write_text(content[:-2])
  with pytest.raises(ValueError, match='train.json '):
    run(copies(), teachers[0])
  file.write_text(content)
  with (tmp_path / 'run' / 'log.jsonl').open('a') as f:
    f.write('{"step": 3, "lo')  # as if it had been killed in the middle of a line
  run(copies(), teachers[0])
  assert [line['step'] for line in log_of(tmp_path / 'run')] == list(range(2, 21, 2))


@pytest.mark.long
def test_a_finished_run_is_not_trained_further_and_its_model_not_written_again(tmp_path):
  for name in ('one', 'other'):
    (tmp_path / name).mkdir()
  tokenizer, other = words(tmp_path / 'one'), words(tmp_path / 'other', eos_token='</s>')
  run = functools.partial(train, tmp_path / 'run', T5_NET, echo=quiet)
  content = lambda: {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.glob('run/model/**/*') if p.is_file()}
  first = run(copies(), settings(), tokenizer=tokenizer)
  before = content()
  again = run(copies(), settings(), tokenizer=tokenizer)
  assert same(first.params, again.params)
  with pytest.raises(ValueError, match=having('other data', '6 steps')):
    run(copies(1), settings(), tokenizer=tokenizer)
  for wrong in (other, None):
    with pytest.raises(ValueError, match='tokenizer [0-9a-f]{16}'):
      run(copies(), settings(), tokenizer=wrong)
  with pytest.raises(ValueError, match=having('model', 'float32', 'bfloat16', 'convert')):
    run(copies(), settings(save_dtype='bfloat16'), tokenizer=tokenizer)
  assert before and content() == before


class Waited:
  """A number on a device that notes when it is waited for."""

  def __init__(self, step: int, waited: list):
    self._step, self._waited = step, waited

  def block_until_ready(self):
    self._waited.append(self._step)

  def __array__(self, *_, **__):
    return np.ones((), np.float32)


def test_no_more_than_two_steps_are_under_way(tmp_path, monkeypatch):
  waited, calls = [], []

  def step(state, *_):
    calls.append(list(waited))
    return state, {'loss': Waited(len(calls), waited)}

  monkeypatch.setattr(loop, 'make_step', lambda *_, **__: step)
  train(tmp_path / 'run', T5_NET, copies(), settings(save_every=6, log_every=6), echo=quiet)
  assert calls == [[], [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


STOPS = [(n, c, w) for n, c in ((signal.SIGINT, 130), (signal.SIGTERM, 143)) for w in ('step', 'save')]


@pytest.mark.full
@pytest.mark.parametrize('number, code, where', long_but(STOPS, [STOPS[3]]))
def test_a_stop_waits_for_the_step_says_its_sentence_and_goes_on(number, code, where, tmp_path, monkeypatch, capsys):
  make, save = loop.make_step, ocp.CheckpointManager.save
  stops = {'step': 3, 'save': 1}  # the turn at which it comes

  def then(name, call, *args, **kwargs):
    stops[name] -= 1
    if name == where and not stops[name]:
      signal.raise_signal(number)
    return call(*args, **kwargs)

  monkeypatch.setattr(loop, 'make_step', lambda *a, **k: functools.partial(then, 'step', make(*a, **k)))
  monkeypatch.setattr(ocp.CheckpointManager, 'save', lambda *a, **k: then('save', save, *a, **k))
  args = '--job=large', '--gin.train.Settings.steps=4', '--gin.train.Settings.save_every=2'
  assert _command(tmp_path, *args) == code
  error = capsys.readouterr().err
  assert error == 'interrupted; the same command goes on from the last saved step\n'
  monkeypatch.undo()
  assert _command(tmp_path, *args) == 0
  out = capsys.readouterr().out
  assert 'going on after step 2 of 4' in out and '[large] step 4/4' in out


@pytest.mark.full
@pytest.mark.parametrize('distance', long_but(losses.DISTANCES, list(losses.DISTANCES)[:1]))
def test_distillation_brings_the_drafter_closer_to_the_verifier(distance, tmp_path):
  teacher = Model(jax.tree.map(lambda x: 1.5 * x, init(T5_NET, 7)), T5_NET, name='teacher')
  optimizer = Optimizer(learning_rate=1e-2, warmup=5)
  s = settings(steps=60, batch_size=16, log_every=10, save_every=100, optimizer=optimizer)
  s = dataclasses.replace(s, distillation=Distillation(distance))
  train(tmp_path / 'run', T5(T5Config(12, 8, 2, 4, 16, 1, 1)), copies(), s, teacher=teacher, echo=quiet)
  log = log_of(tmp_path / 'run')
  assert log[-1][distance] < 0.85 * log[0][distance] and log[-1]['acceptance'] > log[0]['acceptance'] + 0.05


def test_the_distances_are_their_definitions():
  p, q = np.array([0.7, 0.2, 0.1], np.float32), np.array([0.3, 0.3, 0.4], np.float32)
  got = {name: float(f(jnp.log(p), jnp.log(q))) for name, f in losses.DISTANCES.items()}
  kl = (p * np.log(p / q)).sum(), (q * np.log(q / p)).sum()
  accepted = np.minimum(p, q).sum()
  expected = {'forward_kl': kl[0], 'reverse_kl': kl[1], 'tv': 1 - accepted, 'log_acceptance': -np.log(accepted)}
  assert got == pytest.approx(expected, rel=1e-5)


def test_a_teacher_is_at_distance_zero_from_itself_and_weight_mixes_in_the_cross_entropy():
  params, batch = init(T5_NET), collate(first_pairs(3), (8,))
  mixed = Distillation('forward_kl', weight=0.25)
  of = jax.jit(lambda teacher: losses.loss(T5_NET, params, batch, Model(teacher, T5_NET), mixed))
  for teacher in (params, init(T5_NET, 1)):
    value, parts = of(teacher)
    same = teacher is params
    assert (float(parts['forward_kl']) == pytest.approx(0, abs=1e-6)) == same == (parts['acceptance'] > 0.99999)
    assert float(value) == pytest.approx(0.25 * float(parts['forward_kl']) + 0.75 * float(parts['cross_entropy']))


def words(folder, **around):
  """Return a tokenizer of numbers with settings for the tokens around a text."""
  vocabulary = {'<pad>': 0, '</s>': 1} | {str(i): i for i in range(2, 12)}
  backend = Tokenizer(WordLevel(vocabulary, unk_token='<pad>'))
  backend.pre_tokenizer = Whitespace()
  backend.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(around))
  return find(folder)


@pytest.mark.parametrize(
  'around, pairs',
  [
    (dict(bos_token='2', add_bos_token=True), [([2, 3, 4], [5, 6, 1]), ([2, 7], [1])]),
    (dict(bos_token='</s>', add_bos_token=True), [([1, 3, 4], [5, 6, 1]), ([1, 7], [1])]),  # as OPT
    (dict(add_eos_token=True), [([3, 4, 1], [5, 6, 1]), ([7, 1], [1])]),
  ],
)
def test_a_target_begins_with_no_token_and_ends_with_the_end_once(around, pairs, tmp_path):
  tokenizer = words(tmp_path, eos_token='</s>', **around)
  assert list(data.tokenised([('3 4', '5 6'), ('7', '')], tokenizer)) == pairs


def test_a_tokenizer_without_an_end_of_sequence_is_named(tmp_path):
  with pytest.raises(ValueError, match=having('tokenizer.json', 'eos_token')):
    next(data.tokenised([('3', '5')], words(tmp_path)))


def test_a_teachers_outputs_are_those_of_the_decode_command_without_the_cut_off(tmp_path):
  teacher = toy.model(3, 12, eos_ids=(1, 2)).replace(tokenizer=words(tmp_path, eos_token='</s>'))
  sources = ['3 4', '5 6 7', '8', '9 10', '2 2 2']
  out = decode(methods.autoregressive(0), [teacher], sources, max_new_tokens=4, sampler=Sampler(1.0))
  names = 'finish_reason', 'tokens'
  rows = [dict(zip(names, x), index=i) for i, x in enumerate(zip(out.finish_reasons, out.tokens))]
  (tmp_path / 'in.jsonl').write_text('\n'.join(map(json.dumps, sources)))
  (tmp_path / 'out.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  wanted = [(teacher.tokenizer.encode(sources[r['index']]), r['tokens']) for r in rows if r['finish_reason'] == 'eos']
  assert 0 < len(wanted) < 5
  files = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  pairs = data.pairs(data.decoded(*files), teacher.tokenizer)
  assert sorted(itertools.islice(pairs, len(wanted))) == sorted(wanted)
  header = json.dumps({lines.MARK: '1', 'index': 9})
  (tmp_path / 'out.jsonl.part').write_text('\n'.join([header, *map(json.dumps, rows)]))
  whole = data.decoded(files[0], tmp_path / 'out.jsonl.part', unended=True)
  assert whole == [(sources[row['index']], row['tokens']) for row in rows]
  (tmp_path / 'in.jsonl').write_text('"3 4"')
  with pytest.raises(ValueError, match=having('out.jsonl', 'prompt 4', 'in.jsonl')):
    data.decoded(*files)


def test_queries_take_smaller_steps():
  params = init(T5_NET)
  ones = jax.tree.map(jnp.ones_like, params)
  scaled, _ = slow_queries(8).update(ones, slow_queries(8).init(params))
  attention = scaled['decoder']['layers_0']['self_attention']
  assert float(attention['query']['kernel'].max()) == pytest.approx(8**-0.5)
  assert float(attention['key']['kernel'].min()) == 1.0


@pytest.mark.parametrize('schedule, end', [('constant', 1.0), ('linear', 0.0), ('cosine', 0.0), ('rsqrt', 0.1**0.5)])
def test_the_rate_warms_up_and_decays(schedule, end):
  rate = Optimizer(learning_rate=1.0, schedule=schedule, warmup=10).rate(100)
  assert [float(rate(step)) for step in (0, 10, 100)] == pytest.approx([0, 1, end])


def test_batches_hold_every_pair_once_and_in_the_narrowest_width():
  pairs = first_pairs(64)
  found = list(batches(iter(pairs), 4, (4, 8), pool=4))
  assert {b.source.shape for b in found} == {(4, 4), (4, 8)}
  rows = [tuple(row[:n]) for b in found for row, n in zip(b.source, b.source_length, strict=True)]
  assert sorted(rows) == sorted(tuple(source) for source, _ in pairs)
  for b in found:
    assert b.source.shape[1] == 4 or max(b.source_length.max(), b.target_length.max()) > 4


def test_source_and_target_have_widths_of_their_own():
  pairs = [([2] * 3, [3] * 2), ([2] * 9, [3] * 2), ([2] * 3, [3] * 5), ([2] * 20, [4, 5, 6, 7, 8, 9, 1])]
  shapes = ((16, 4), (4, 4), (16, 6))
  alone = [collate([pair], shapes, ends={1}) for pair in pairs]
  assert [batch.source.shape + batch.target.shape for batch in alone] == [
    (1, 4, 1, 4),
    (1, 16, 1, 4),
    (1, 16, 1, 6),
    (1, 16, 1, 6),
  ]
  assert alone[3].truncated.tolist() == [1, 1] and alone[3].target.tolist() == [[4, 5, 6, 7, 8, 1]]
  assert alone[3].source.tolist() == [[2] * 16] and alone[3].target_length.tolist() == [6]
  for widths, parts in (((16, (4, 32)), ['(16, 32)']), ((0,), ['0']), (((4, 0),), ['(4, 0)']), ((), ['widths=()'])):
    with pytest.raises(ValueError, match=having('widths', *parts)):
      settings(widths=widths)


def test_repeated_data_come_in_a_new_order_each_time_through():
  pairs = [([i], [i]) for i in range(1, 20)]
  drawn = list(itertools.islice(data.repeated(pairs), 38))
  assert sorted(drawn[:19]) == sorted(drawn[19:]) == pairs and drawn[:19] != drawn[19:]
  assert drawn == list(itertools.islice(data.repeated(pairs), 38))


def test_training_leaves_the_model_that_it_starts_from_alone(tmp_path):
  start = Model(init(T5_NET), T5_NET)
  before = jax.tree.map(np.asarray, start.params)
  after = train(tmp_path / 'run', T5_NET, copies(), settings(steps=3), start=start, echo=quiet)
  assert same(before, start.params) and not same(before, after.params)


@pytest.mark.parametrize('given', [str, Checkpoint], ids=['a path', 'a Checkpoint'])
def test_a_job_with_a_scanned_network_starts_from_a_checkpoint(tmp_path, monkeypatch, given):
  monkeypatch.setattr(jobs, 'train', lambda *_, start, **__: start())
  hf.write(tmp_path / 'start', Model(init(T5_NET), T5_NET))
  network = NETWORKS['t5 scanned']
  job = jobs.Job('more', network, copies(), settings(steps=1), start=given(str(tmp_path / 'start')))
  assert job.run(tmp_path, quiet).network == network


@pytest.mark.parametrize('network', long_but([T5_NET, DECODER], [T5_NET]), ids=['t5', 'decoder'])
def test_the_result_loads_as_it_was_written(tmp_path, network):
  model = train(tmp_path / 'run', network, copies(), settings(save_dtype='bfloat16'), echo=quiet)
  back = checkpoints.read(tmp_path / 'run' / 'model')
  assert back.network.dtype == 'bfloat16' and back.network.config == hf.settled(network).config
  for x, y in zip(*map(jax.tree.leaves, (model.params, back.params)), strict=True):
    np.testing.assert_array_equal(x.astype(jnp.bfloat16), y)


@pytest.mark.long
def test_a_finished_run_is_written_in_another_dtype_where_its_model_was_removed(tmp_path):
  train(tmp_path / 'run', T5_NET, copies(), settings(steps=1), echo=quiet)
  shutil.rmtree(tmp_path / 'run' / 'model')
  model = train(tmp_path / 'run', T5_NET, copies(), settings(steps=1, save_dtype='bfloat16'), echo=quiet)
  back = checkpoints.read(tmp_path / 'run' / 'model')
  assert back.network.dtype == 'bfloat16'
  np.testing.assert_array_equal(*(m.params['token_embedder']['embedding'].astype('bfloat16') for m in (model, back)))


def test_tokens_and_positions_that_a_network_lacks_are_named():
  learned = Decoder(dataclasses.replace(DECODER.config, positions=8))
  first = lambda pair, *networks: next(batches([([3], [1]), pair], 2, (8,), networks=networks))
  for pair, parts in (
    (([3, 12], [1]), having('source of pair 1', 'token 12', 'T5', 'vocab_size=12')),
    (([3], [-1, 1]), having('target of pair 1', 'token -1', 'T5')),
  ):
    with pytest.raises(ValueError, match=parts):
      first(pair, T5_NET)
  with pytest.raises(ValueError, match=having('pair 1', '9 tokens', 'Decoder', '8 positions')):
    first(([3] * 5, [4] * 4), DECODER, learned)
  for networks in ((learned,), (T5_NET, DECODER)):
    assert first(([11] * 4, [4] * 4), *networks).source.shape == (2, 8)


@pytest.mark.parametrize('missing', long_but(['network', 'teacher'], ['teacher']))
def test_training_refuses_tokens_that_the_network_or_the_teacher_lacks(missing, tmp_path):
  wide, narrow = T5(dataclasses.replace(T5_NET.config, vocab_size=20)), T5_NET
  network, taught = (narrow, wide) if missing == 'network' else (wide, narrow)
  with pytest.raises(ValueError, match=having('target of pair 0', 'token 15', 'T5', 'vocab_size=12')):
    train(tmp_path, network, [([3], [15, 1])], settings(), teacher=Model(init(taught), taught), echo=quiet)


def test_mistakes_are_named_before_any_work(tmp_path):
  def run(network=T5_NET, pairs=None, start=None, teacher=None, companion=None, **changes):
    pairs = copies() if pairs is None else pairs
    models = dict(start=start, teacher=teacher, companion=companion)
    return train(tmp_path / 'bad', network, pairs, settings(**changes), **models, echo=quiet)

  taught = Model({}, T5_NET)
  wider = dataclasses.replace(T5_NET.config, mlp_dim=64)
  post_norm = Decoder(dataclasses.replace(DECODER.config, norms='post'))
  for call, parts in (
    (lambda: run(pairs=[([2] * 9, [1])]), ('source of pair 0', '9 tokens', '8')),
    (lambda: run(pairs=[([2], [])]), ('target of pair 0', '0 tokens')),
    (lambda: run(pairs=first_pairs(4)), ('1 steps', '6')),
    (lambda: run(steps=7), ('settings',)),
    (lambda: run(distillation=Distillation()), ('teacher',)),
    (lambda: run(T5(T5_NET.config, dtype='bfloat16')), ('float32',)),
    (lambda: run(post_norm, pairs=()), ('DecoderConfig', 'checkpoints.family')),
    (lambda: run(start=Model({}, DECODER)), ('start', 'type=', 'Decoder', 'T5')),
    (lambda: run(start=Model({}, T5(wider))), ('start has mlp_dim=64, but network mlp_dim=32:',)),
    (lambda: run(start=Model({}, NETWORKS['t5 scanned'])), ('start', 'scan=True', 'scan=False')),
    (lambda: settings(steps=0), ('steps=0',)),
    (lambda: Distillation('l2'), ("distance='l2'", 'forward_kl')),
    (lambda: Distillation(companion=-1), ('companion=-1',)),
    (lambda: Distillation(rule=rules.opt), ('opt', 'alpha')),
    (lambda: Distillation(rule='optt:0.1'), ("'optt'", 'opt')),
    (lambda: run(distillation=Distillation(companion=1.0), teacher=taught), ('companion',)),
    (lambda: run(distillation=Distillation(), teacher=taught, companion=taught), ('companion',)),
    (lambda: Optimizer(schedule='step'), ("schedule='step'", 'constant')),
    (lambda: Optimizer(learning_rate=math.nan), ('learning_rate=nan', 'above 0')),
    (lambda: Optimizer(warmup=0.5), ('warmup=0.5',)),
    (lambda: Optimizer(clip=-1), ('clip=-1', '0')),
    (lambda: next(data.repeated([])), ('no pairs',)),
  ):
    with pytest.raises(ValueError, match=having(*parts)):
      call()


def test_a_saved_model_is_the_start_of_a_job_with_its_network(tmp_path):
  run = functools.partial(train, network=DECODER, pairs=copies(), echo=quiet)
  run(tmp_path / 'first', settings=settings(steps=1))
  start = speccascade.load(tmp_path / 'first' / 'model')
  assert start.network.config.context and not DECODER.config.context
  run(tmp_path / 'second', settings=settings(steps=1), start=start)


@pytest.mark.parametrize(
  'token, changes, name',
  [
    (2, dict(log_every=1), 'the loss is nan'),
    (2, dict(log_every=6, save_every=1), 'the loss is nan'),
    (3, dict(steps=1, log_every=1), 'a parameter'),  # of a token that no text has
  ],
  ids=['at a line of the log', 'between two lines', 'by the last step'],
)
def test_what_is_not_finite_stops_the_run_and_is_not_saved(tmp_path, token, changes, name):
  params = init(T5_NET)
  params['token_embedder']['embedding'] = params['token_embedder']['embedding'].at[token].set(jnp.nan)
  start = Model(params, T5_NET)
  with pytest.raises(FloatingPointError, match=having(name, 'step 1', 'learning_rate')):
    train(tmp_path / 'run', T5_NET, itertools.repeat(([2, 1], [2, 1])), settings(**changes), start=start, echo=quiet)
  assert not list(tmp_path.glob('run/state/[0-9]*')) and not (tmp_path / 'run' / 'model').exists()


CONFIG = """
train.jobs = [@large/train.Job(), @small/train.Job()]
train.Job.network = @train.T5()
train.T5.config = @train.T5Config()
train.T5Config.vocab_size = 1000
train.T5Config.heads = 2
train.T5Config.head_dim = 4
train.T5Config.mlp_dim = 16
train.T5Config.encoder_layers = 1
train.T5Config.decoder_layers = 1
train.Job.tokenizer = @train.vocabulary()
train.Job.task = "embedded(split='train', count=40)"
train.Job.settings = @train.Settings()
train.Settings.steps = 3
train.Settings.batch_size = 4
train.Settings.widths = (80,)
train.Settings.log_every = 1
large/train.Job.name = 'large'
large/train.T5Config.embed_dim = 16
small/train.Job.name = 'small'
small/train.Job.teacher = 'large'
small/train.T5Config.embed_dim = 8
small/train.Settings.distillation = @train.Distillation()
"""


def _command(tmp_path, *more):
  (tmp_path / 'config.gin').write_text(CONFIG)
  return __main__.main([f'--gin_file={tmp_path}/config.gin', f'--out={tmp_path}/out', *more])


@pytest.mark.full
def test_the_command_trains_every_job_and_a_later_one_from_an_earlier(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(logging.getLogger('absl'), 'level', 31)
  assert _command(tmp_path, '--gin.train.Settings.log_every=3') == 0
  out = capsys.readouterr().out
  assert '[large] step 3/3' in out and 'steps/s' in out and '00:00 left' in out and '[large] step 1/3' not in out
  assert 'forward_kl' in [line for line in out.splitlines() if '[small] step 3/3' in line][0]
  small = speccascade.load(tmp_path / 'out' / 'small' / 'model')
  assert small.network.config.embed_dim == 8 and small.tokenizer is not None
  assert logging.getLogger('absl').level == 31


def test_a_config_may_import_a_module_of_the_users(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'my_pairs.py').write_text('import gin\n\n\n@gin.register\ndef twins():\n  return [([3, 1], [3, 1])]\n')
  for text in ('@my_pairs.twins', '@my_pairs.twins()', "'my_pairs:twins'"):
    config = re.sub(r'(?m)^train.Job.task = .*', f'train.Job.task = {text}', CONFIG)
    (tmp_path / 'config.gin').write_text(f'import my_pairs\n{config}')
    found = [job.task for job in jobs.read([str(tmp_path / 'config.gin')])]
    assert [task() if callable(task) else task for task in found] == 2 * [[([3, 1], [3, 1])]]


@pytest.mark.parametrize('network', long_but([T5_NET, DECODER], [T5_NET]), ids=['t5', 'decoder'])
def test_what_lies_in_the_padding_moves_neither_loss_nor_gradient(network):
  params = init(network)
  clean = collate([([3, 4], [5, 1]), ([3, 4, 5, 6], [7, 8, 9, 1])], (8,))
  outside = [np.arange(8)[None] >= n[:, None] for n in (clean.source_length, clean.target_length)]
  dirty = clean.replace(source=np.where(outside[0], 7, clean.source), target=np.where(outside[1], 9, clean.target))
  gradient = jax.jit(jax.value_and_grad(lambda p, b: losses.loss(network, p, b)[0]))
  results = [gradient(params, b) for b in (clean, dirty)]
  for x, y in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)
