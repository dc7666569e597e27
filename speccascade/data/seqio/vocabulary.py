"""Any tokenizer that speccascade reads, as a seqio vocabulary."""

import numpy as np
import seqio
import tensorflow as tf

from speccascade.data.tokenizers import Tokenizer


class TokenizerVocabulary(seqio.Vocabulary):
  """A tokenizer with seqio's interface; it gives the ids that decoding makes of a text.

  Args:
    tokenizer: The tokenizer.
    begins: Whether texts get the tokens that the family puts before them, as prompts do. seqio appends the end.
  """

  def __init__(self, tokenizer: Tokenizer, *, begins: bool):
    super().__init__()
    prefixed = tokenizer.encode('')
    bare = tokenizer.encode('', begins=False)
    self.ends_texts = bool(bare) and bare[-1] in tokenizer.eos_ids
    self.tokenizer = tokenizer
    self._begins = begins
    self._bos_id = prefixed[0] if len(prefixed) > len(bare) else None

  @property
  def bos_id(self) -> int | None:
    return self._bos_id

  @property
  def eos_id(self) -> int | None:
    return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else None

  @property
  def unk_id(self) -> int | None:
    return None  # ids beyond the pieces have no text

  @property
  def _base_vocab_size(self) -> int:
    return len(self.tokenizer.pieces())

  def _encode(self, s: str) -> list[int]:
    ids = self.tokenizer.encode(s, begins=self._begins)
    return ids[: len(ids) - self.ends_texts]

  def _decode(self, ids) -> str:
    return self.tokenizer.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text):
      text = text if isinstance(text, bytes) else text.item()  # bytes in a graph, an array otherwise
      return np.array(self._encode(text.decode()), np.int32)

    encoded = tf.numpy_function(encode, [s], tf.int32)
    return tf.ensure_shape(encoded, [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    decoded = tf.numpy_function(lambda row: self._decode(row.tolist()).encode(), [ids], tf.string)
    return tf.ensure_shape(decoded, [])

  def __eq__(self, other) -> bool:
    return isinstance(other, TokenizerVocabulary) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def _key(self) -> tuple[Tokenizer, bool]:
    return self.tokenizer, self._begins
