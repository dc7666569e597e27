"""A learned vocabulary is the one that is asked for, also where its file is there already."""

import pathlib

from matching import having
import pytest

from speccascade.train import vocabulary


@pytest.fixture
def ask(tmp_path):
  (tmp_path / 'texts').write_text('a red dog runs\nand sleeps well\n' * 20)
  file = str(tmp_path / 'x.model')

  def ask(size=17, settings=None):
    return vocabulary.learned_vocabulary(file, [str(tmp_path / 'texts')], size=size, settings=settings)

  return ask


def test_a_vocabulary_is_learned_once(ask):
  made = pathlib.Path(ask()).read_bytes()
  assert pathlib.Path(ask()).read_bytes() == made


def test_a_vocabulary_of_another_size_settings_or_texts_is_refused(ask, tmp_path):
  ask()
  with pytest.raises(ValueError, match=having('x.model', 'this size:')):
    ask(size=16)
  with pytest.raises(ValueError, match=having('x.model', 'this settings:')):
    ask(settings={'model_type': 'bpe'})
  (tmp_path / 'texts').write_text('other texts\n' * 30)
  with pytest.raises(ValueError, match=having('x.model', 'this texts:')):
    ask()


def test_a_file_of_which_nothing_says_what_it_was_learned_of_is_refused(ask, tmp_path):
  (tmp_path / 'x.model').write_bytes(b'old')
  with pytest.raises(ValueError, match=having('x.model', 'size and settings and texts', 'by its path')):
    ask()
