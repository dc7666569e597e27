"""Tokenizers: the formats agree, the families' conventions apply, differences are named."""

import dataclasses
import json
import pathlib
import pickle
import shutil

import jax
from matching import having
import pytest
from vocabularies import bare, byte_level, t5

from experiments.helpers.families import corpus
from speccascade import checkpoints, decode, embedded, methods, Request, Sampler
from speccascade.data import templates, tokenizer_formats, tokenizers
from speccascade.engine import requests
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model, Network

FAMILIES = {'multi30k': 'spiece.model', 'gsm8k': 'tokenizer.model'}
TEXTS = [
  '',
  ' ',
  'a</s>b <pad> the <s>, <unk> ',
  'Two dogs run  along the beach.',
  ' Über naïve\tEssays\n\n– 12,345.67 € ☃ 犬 ',
  'a' * 300,
]


def _pair(families, family):
  folder = families / family
  model = tokenizers.Tokenizer(str(folder / FAMILIES[family]))
  return model, tokenizers.Tokenizer(str(folder / 'hf_tokenizer' / 'tokenizer.json'))


@pytest.mark.parametrize('family', list(FAMILIES))
def test_both_formats_give_the_same_ids_and_texts(families, family):
  model, fast = _pair(families, family)
  assert model.pieces() == fast.pieces() and model.eos_ids == fast.eos_ids
  for text in TEXTS + corpus(family, 500):
    ids = model.encode(text)
    assert ids == fast.encode(text), text
    if 'unk' not in ''.join(model.pieces()[i] for i in ids):
      assert model.decode(ids) == fast.decode(ids), text


@pytest.mark.parametrize('family', list(FAMILIES))
def test_each_family_keeps_its_convention_and_writes_no_control_tokens(families, family):
  for tokenizer in _pair(families, family):
    ids = tokenizer.encode('the sum of 3 and 4')
    if family == 'multi30k':
      assert ids[-1] == 1 and tokenizer.encode('') == [1] and tokenizer.eos_ids == (1,)
    else:
      assert ids[0] == 1 and ids[-1] != 2 and tokenizer.encode('') == [1] and tokenizer.eos_ids == (2,)
    control = [i for i, piece in enumerate(tokenizer.pieces()) if piece in ('<s>', '</s>', '<pad>')]
    assert tokenizer.decode([*ids, *control, len(tokenizer.pieces()) + 5, -1]) == 'the sum of 3 and 4'
    assert tokenizer.decode([]) == ''


def test_a_model_folder_finds_its_own_tokenizer_or_its_familys(families, tmp_path):
  folder = families / 'multi30k'
  expected = tokenizers.Tokenizer(str(folder / 'spiece.model'))
  assert tokenizers.find(folder / 'small') == tokenizers.find(folder) == tokenizers.find(expected.path) == expected
  (tmp_path / 'hf_tokenizer').mkdir()
  (tmp_path / 'small').mkdir()
  assert tokenizers.find(tmp_path / 'small') is None
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / 'hf_tokenizer' / name).write_bytes((folder / 'hf_tokenizer' / name).read_bytes())
  assert tokenizers.find(tmp_path / 'small').path == str(tmp_path / 'hf_tokenizer' / 'tokenizer.json')
  (tmp_path / 'small' / 'mine.model').write_bytes((folder / 'spiece.model').read_bytes())
  own = tokenizers.find(tmp_path / 'small')
  assert own.path == str(tmp_path / 'small' / 'mine.model') and own.encode('a') == expected.encode('a')
  (tmp_path / 'small' / 'other.model').write_bytes(b'')  # two of them: neither is the tokenizer
  assert tokenizers.find(tmp_path / 'small').path == str(tmp_path / 'hf_tokenizer' / 'tokenizer.json')


def test_a_tokenizer_is_its_path(families):
  a, b = (_pair(families, 'multi30k')[0] for _ in range(2))
  assert a == b and {a: 1}[b] == 1 and pickle.loads(pickle.dumps(a)).encode('x') == a.encode('x')


def test_settings_overrule_what_the_files_say(families, tmp_path):
  for family, file in (('multi30k', 'spiece.model'), ('gsm8k', 'hf_tokenizer/tokenizer.json')):
    source = families / family / file
    target = tmp_path / family
    target.mkdir()
    (target / source.name).write_bytes(source.read_bytes())
    settings = {'add_bos_token': False, 'add_eos_token': family == 'gsm8k', 'bos_token': '<s>'}
    (target / 'tokenizer_config.json').write_text(json.dumps(settings | {'eos_token': {'content': '</s>'}}))
    ids = tokenizers.find(target).encode('a')
    assert 1 not in ids and (ids[-1] == 2) == (family == 'gsm8k')
    assert [p.rsplit('/', 1)[1] for p in tokenizers.find(target).files()] == [source.name, 'tokenizer_config.json']


# ---- tokens added to a vocabulary ----


def test_sentinels_and_other_added_tokens_are_read_written_and_skipped(tmp_path):
  (tmp_path / 'added_tokens.json').write_text('{"<|turn|>": 1004}')
  found = {'1005': {'content': '<tool>', 'special': False, 'single_word': True}}
  tokenizer = t5(tmp_path, extra_ids=3, eos_token='<|turn|>', added_tokens_decoder=found)
  before, after = tokenizer.encode('A dog')[:-1], tokenizer.encode('runs')
  ids = tokenizer.encode('A dog <extra_id_0> runs')
  assert ids == [*before, 1002, *after] and tokenizer.eos_ids == (1004,) == tuple(after[-1:])
  assert tokenizer.decode(ids) == 'A dog runs'
  assert tokenizer.decode(ids, special=True) == 'A dog<extra_id_0> runs<|turn|>'
  assert tokenizer.encode('A dog<|turn|>runs</s>', begins=False)[:-2] == [*before, 1004, *after[:-1]]
  assert tokenizer.decode([*before, 1005, *after]) == 'A dog<tool> runs'
  assert tokenizer.encode('A dog' + ' ' * 200_000 + '<extra_id_0> <extra_id_1>') == [*before, 1002, 1001, 1004]
  assert tokenizer.decode([*before, 1003, *after]) == 'A dog runs'  # an id that is none
  assert 1005 in tokenizer.encode('a <tool>') and 1005 not in tokenizer.encode('a <tool>s')
  assert tokenizer.pieces()[1000:] == ['<extra_id_2>', '<extra_id_1>', '<extra_id_0>', '', '<|turn|>', '<tool>']
  assert str(tmp_path / 'added_tokens.json') in tokenizer.files()
  assert tokenizers.check_vocabularies([_model(tokenizer, 1024, 'a')]) == 1006


@pytest.mark.parametrize(
  ('settings', 'pieces', 'text'),
  [
    ({}, '▁the<|turn|>▁the', 'the<|turn|> the'),
    ({'legacy': True}, '▁the<|turn|>▁the', 'the<|turn|> the'),
    ({'legacy': False}, '▁the<|turn|>the', 'the<|turn|>the'),
    ({'add_prefix_space': False}, 'the<|turn|>the', 'the<|turn|>the'),
  ],
)
def test_a_space_comes_before_a_text_where_the_settings_say_so(tmp_path, settings, pieces, text):
  tokenizer = t5(tmp_path, added_tokens_decoder={'1000': {'content': '<|turn|>', 'special': True}}, **settings)
  ids = tokenizer.encode('the<|turn|>the')[:-1]
  assert (''.join(tokenizer.pieces()[i] for i in ids), tokenizer.decode(ids, special=True)) == (pieces, text)


def test_an_unknown_character_without_a_space_before_it_is_read(tmp_path):
  tokenizer = t5(tmp_path, added_tokens_decoder={'1000': {'content': '<|turn|>', 'special': True}}, legacy=False)
  ids = tokenizer.encode('<|turn|>日本 the')
  assert ids[:2] == [1000, tokenizer.encode('日本')[-2]] and tokenizer.pieces()[ids[1]] == '<unk>'


def test_a_model_that_puts_no_space_before_a_text_writes_none_twice(tmp_path):
  import sentencepiece

  made = dict(vocab_size=8, add_dummy_prefix=False, remove_extra_whitespaces=False, minloglevel=2)
  with (tmp_path / 'tokenizer.model').open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(['the the']), model_writer=file, **made)
  tokenizer = tokenizers.find(tmp_path)
  text = '<s>the</s> the'
  assert tokenizer.decode(tokenizer.encode(text, begins=False), special=True) == text


@pytest.mark.long
def test_a_model_fills_spans_with_the_sentinels_of_its_tokenizer(tmp_path):
  network = T5(T5Config(1024, 8, 2, 4, 8, 1, 1), (1,), 0)
  model = Model(network.init(jax.random.key(0)), network, t5(tmp_path, extra_ids=3))
  request = Request('A dog <extra_id_0>.', logit_bias={1002: 1e4}, temperature=0.0)
  out = decode(methods.autoregressive(), [model], request, max_new_tokens=2)
  assert out.tokens == [[1002, 1002]] and out.texts == ['']


def test_special_tokens_that_no_file_has_give_a_warning_when_a_model_is_loaded(tmp_path):
  tokenizer = t5(tmp_path, eos_token='<|turn|>', additional_special_tokens=['</s>', {'content': '<x>'}])
  model = _model(tokenizer, 1024, 'mine')
  model.network.eos_ids = (1, 1004)
  with pytest.warns(UserWarning, match=having('1004', "'<|turn|>'", "'<x>'", 'mine', '1000 tokens')):
    tokenizers.check_special(model)
  plain = _model(t5(tmp_path), 1128, 't5')
  plain.network.start_id = 0
  with pytest.warns(UserWarning, match=having('100 sentinels', '"extra_ids": 100', 't5')):
    tokenizers.check_special(plain)
  folder = tmp_path / 'model'
  shutil.copytree(pathlib.Path(embedded.vocabulary()).parent, folder)
  (folder / 'special_tokens_map.json').write_text('{"eos_token": "<|turn|>"}')
  with pytest.warns(UserWarning, match=having("'<|turn|>'", 'model')):
    checkpoints.load(folder)


@pytest.mark.parametrize(
  ('name', 'content', 'match'),
  [
    ('added_tokens.json', '["<a>"]', having('added_tokens.json', 'JSON')),
    ('added_tokens.json', '{"<a>": "x"}', "'x'"),
    ('added_tokens.json', '{"<a>": 1000000000}', "'1000000000'"),
    ('tokenizer_config.json', '{"added_tokens_decoder": {"7": {}}}', having('{}', "'7'")),
    ('tokenizer_config.json', '{"extra_ids": "many"}', "extra_ids='many'"),
  ],
)
def test_wrong_added_tokens_are_named(tmp_path, name, content, match):
  tokenizer = t5(tmp_path)
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=match):
    tokenizer.encode('a')


ANY = [True, 0, -5, 1.5, 'false', [], [1], [[]], [{}], {}, {'content': 1}, {'a': 1}, {'7': 'x'}]
ANY += [{'content': 'x', 'lstrip': 'false'}, {'7': {'content': 'x', 'special': 'no'}}, {'-1': {'content': 'x'}}]
ANY += [{'9' * 5000: {'content': 'x'}}]
NAMED = [{}, {'7': 'x'}, *ANY[-2:], {'content': 'x', 'lstrip': 'false'}]  # tokens by their names
RIGHT = {  # of these, the values that a key may have
  **dict.fromkeys(('add_bos_token', 'add_eos_token', 'add_prefix_space', 'legacy'), [True]),
  **dict.fromkeys((*tokenizer_formats.SPECIAL,), ['false']),
  **dict.fromkeys(('additional_special_tokens', 'extra_special_tokens'), ['false', [], *NAMED]),
  'added_tokens_decoder': [{}],
  'extra_ids': [0],
  'chat_template': ['false', []],
}


@pytest.mark.parametrize('key', [*RIGHT])
def test_a_setting_of_another_type_is_named_with_its_file(tmp_path, key):
  tokenizer = t5(tmp_path)
  for name in ('tokenizer_config.json', 'special_tokens_map.json'):
    for value in ANY:
      (tmp_path / name).write_text(json.dumps({key: value}))
      if any(value == x and type(value) is type(x) for x in RIGHT[key]):
        assert tokenizer.decode(tokenizer.encode('A dog')) == 'A dog'
        continue
      with pytest.raises(ValueError, match=having(f'{tmp_path / name}', f'{key}=')) as info:
        tokenizer.encode('A dog')
      assert len(str(info.value)) < 600
    (tmp_path / name).write_text('{}')


def test_what_the_library_of_tokenizers_cannot_do_is_one_sentence(tmp_path, capfd):
  from tokenizers import models, pre_tokenizers, Regex, Tokenizer

  fast = Tokenizer(models.WordLevel({'b': 0}))
  fast.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match=having(f'{tmp_path}/tokenizer.json', 'UNK', 'unk_token')):
    tokenizers.find(tmp_path).encode('a')
  fast = Tokenizer(models.WordLevel({'b': 0, 'a': 1}, unk_token='b'))
  fast.pre_tokenizer = pre_tokenizers.Split(Regex('(a|aa)+$'), 'isolated')  # in which 2ⁿ ways are tried
  fast.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match=having(f'{tmp_path}/tokenizer.json', 'text')):
    tokenizers.find(tmp_path).encode('a' * 100 + 'b')
  capfd.readouterr()  # the library prints its panic


def test_an_id_larger_than_any_vocabulary_is_named(tmp_path):
  tokenizer = byte_level(tmp_path)
  file = tmp_path / 'vocab.json'
  vocabulary = json.loads(file.read_text())
  for content, parts in ((vocabulary | {'far': 4 * 10**9}, ("'far'", '4000000000')), ({}, ('no tokens',))):
    file.write_text(json.dumps(content))
    (tmp_path / 'merges.txt').write_text('')
    with pytest.raises(ValueError, match=having(f'{file}', *parts)):
      tokenizer.encode('the')


# ---- chat ----

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role == 'system' and not loop.first %}
    {{- raise_exception('the system speaks first') }}
  {%- endif %}
  {{- '[' + message.role + '] ' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
HELLO = [{'role': 'user', 'content': 'the a'}]


def _chatty(folder, template=TEMPLATE, **settings):
  """Return a tokenizer with a template; its tokens are <s>, </s>, letters and a few words."""
  from tokenizers import models, pre_tokenizers, processors, Tokenizer

  words = ['<s>', '</s>', '<unk>', '[', ']', 'user', 'system', 'assistant', 'the', 'a']
  fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
  fast.pre_tokenizer = pre_tokenizers.Whitespace()
  fast.add_special_tokens(['<s>', '</s>'])
  fast.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
  fast.save(str(folder / 'tokenizer.json'))
  config = {'bos_token': '<s>', 'eos_token': {'content': '</s>'}} | settings
  (folder / 'tokenizer_config.json').write_text(json.dumps(config | ({'chat_template': template} if template else {})))
  return tokenizers.find(folder)


def test_chat_is_the_checkpoints_template_and_no_token_comes_twice(tmp_path):
  tokenizer = _chatty(tmp_path)
  words = [tokenizer.pieces()[i] for i in tokenizer.chat(HELLO)]
  assert words == ['<s>', '[', 'user', ']', 'the', 'a', '</s>', '[', 'assistant', ']']
  assert tokenizer.encode('the')[0] == 0  # which `chat` leaves to the template


def test_a_template_is_in_a_list_or_in_its_own_file(tmp_path):
  expected = _chatty(tmp_path).chat(HELLO)
  several = [{'name': 'tool_use', 'template': 'a'}, {'name': 'default', 'template': TEMPLATE}]
  assert _chatty(tmp_path, several).chat(HELLO) == expected
  (tmp_path / 'chat_template.jinja').write_text(TEMPLATE)
  tokenizer = _chatty(tmp_path, 'a')
  assert tokenizer.chat(HELLO) == expected
  assert str(tmp_path / 'chat_template.jinja') in tokenizer.files()  # a converted checkpoint keeps it


def test_tools_have_a_template_of_their_own(tmp_path):
  several = [{'name': 'default', 'template': 'a'}, {'name': 'tool_use', 'template': 'the {{ tools[0] }}'}]
  tokenizer = _chatty(tmp_path, several)
  assert (tokenizer.chat_text(HELLO), tokenizer.chat_text(HELLO, tools=['x'])) == ('a', 'the x')
  assert _chatty(tmp_path, several[:1]).chat_text(HELLO, tools=['x']) == 'a'
  (tmp_path / 'chat_template.jinja').write_text('user')
  (tmp_path / 'additional_chat_templates').mkdir()
  (tmp_path / 'additional_chat_templates' / 'tool_use.jinja').write_text('system {{ tools[0] }}')
  assert (tokenizer.chat_text(HELLO), tokenizer.chat_text(HELLO, tools=['x'])) == ('user', 'system x')
  (tmp_path / 'copy').mkdir()
  checkpoints.files.copy_tokenizer(tokenizer, tmp_path / 'copy')
  assert tokenizers.find(tmp_path / 'copy').chat_text(HELLO, tools=['x']) == 'system x'


def test_a_template_is_laid_out_as_its_writer_saw_it(tmp_path):
  lines = '{% for m in messages %}\n  {% if m.role == "user" %}\n[{{ m | tojson }}]\n  {% endif %}\n{% endfor %}\n'
  text = _chatty(tmp_path, lines).chat_text([{'role': 'user', 'content': 'é<'}])
  assert text == '[{"role": "user", "content": "é<"}]\n'


def _text(folder, template, messages=HELLO, **arguments):
  """Return the words that a template makes of messages."""
  tokenizer = _chatty(folder, template)
  return ' '.join(tokenizer.pieces()[i] for i in tokenizer.chat(messages, **arguments))


def test_a_template_knows_every_token_that_the_settings_name(tmp_path):
  names = {'sep_token': '</s>', 'extra_special_tokens': {'image_token': {'content': '<s>'}}}
  tokenizer = _chatty(tmp_path, '{{ bos_token }}{{ sep_token }}{{ image_token }}', **names)
  assert tokenizer.chat_text(HELLO) == '<s></s><s>'


def test_a_template_has_arguments_the_date_and_marks_of_what_was_trained_on(tmp_path):
  arguments = '{% if enable_thinking %}the{% endif %} {{ tools[0].name }}'
  assert _text(tmp_path, arguments, tools=[{'name': 'user'}], enable_thinking=True) == 'the user'
  assert _text(tmp_path, '{% if add_generation_prompt %}the{% else %}a{% endif %}', add_generation_prompt=False) == 'a'
  marked = '{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}'
  assert _text(tmp_path, marked) == 'the a'
  dated = "{% if strftime_now('%Y') | int >= 2024 and '%' not in strftime_now('%d %b') %}the{% endif %}"
  assert _text(tmp_path, dated) == 'the'
  with pytest.raises(ValueError, match=having('chat_template_kwargs', 'bos_token')):
    _text(tmp_path, 'a', bos_token='x')


def test_arguments_of_a_template_belong_to_a_request(tmp_path):
  model = embedded.models()[0].replace(tokenizer=_chatty(tmp_path, '{{ enable_thinking }} the'))
  given = [Request(HELLO, chat_template_kwargs={'enable_thinking': word}) for word in ('user', 'a')]
  rows = requests.rows([model], given, max_new_tokens=1, sampler=Sampler(), seed=0)
  assert [row.tokens.tolist() for row in rows] == [[5, 8], [9, 8]]
  wrong = ('the', {}), (HELLO, [1]), (HELLO, {'messages': []})
  for prompt, arguments in wrong:
    with pytest.raises(ValueError, match='chat_template_kwargs'):
      asked = [Request(prompt, chat_template_kwargs=arguments)]
      requests.rows([model], asked, max_new_tokens=1, sampler=Sampler(), seed=0)


def test_a_content_comes_in_parts_where_the_template_takes_them(tmp_path):
  messages = [{'role': 'user', 'content': [{'type': 'text', 'text': 'the'}, {'type': 'text', 'text': 'a'}]}]
  assert _text(tmp_path, '{% for part in messages[0].content %}{{ part.text }} {% endfor %}', messages) == 'the a'
  for template in (TEMPLATE, '{{ messages[0].content }}', "{{ messages[0].content + 'a' }}"):
    with pytest.raises(ValueError, match=having('messages', 'parts')):
      _text(tmp_path, template, messages)
  called = [*HELLO, {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'a'}]}]
  assert _text(tmp_path, '{{ messages[1].content }}{{ messages[1].tool_calls[0].name }}', called) == 'a'
  asks = "{% if messages[1]['content'] is none %}{{ messages[1].content | trim }}the{% endif %}"  # as R1's
  assert _text(tmp_path, asks, called) == 'the'


def test_special_tokens_in_messages_become_ids_unless_chats_are_plain(tmp_path):
  tokenizer = _chatty(tmp_path)
  special = [{'role': 'user', 'content': 'the </s> a'}]
  assert tokenizer.chat(special).count(1) == 2
  plain = dataclasses.replace(tokenizer, plain_chat=True)
  assert plain.chat(HELLO) == tokenizer.chat(HELLO)
  with pytest.raises(ValueError, match=having('message 0', '</s>')):
    plain.chat(special)
  (tmp_path / 'tokenizer.json').unlink()
  plain = dataclasses.replace(t5(tmp_path, chat_template=TEMPLATE, extra_ids=1), plain_chat=True)
  with pytest.raises(ValueError, match=having('message 0', '<extra_id_0>')):
    plain.chat([{'role': 'user', 'content': [{'type': 'text', 'text': 'a<extra_id_0>'}]}])


@pytest.mark.parametrize(
  'template, messages, match',
  [
    (None, HELLO, having('tokenizer_config.json', 'chat_template', 'chat_template.jinja')),
    ([{'name': 'rag', 'template': 'a'}], HELLO, having("['rag']", "'default'")),
    ('{% if %}', HELLO, having('tokenizer_config.json', 'chat template')),
    (TEMPLATE, [*HELLO, {'role': 'system', 'content': 'a'}], r'\(the system speaks first\)'),
    (TEMPLATE, [{'role': 'user'}], having('message 0', "{'role': 'user'}")),
    (TEMPLATE, [*HELLO, {'role': 'user', 'content': 3}], 'message 1'),
    (TEMPLATE, [*HELLO, {'role': 'user', 'content': '\ud83d'}], having('message 1', 'half a character')),
    (TEMPLATE, [], r'messages=\[\]'),
    ("{{ ''.__class__.__mro__ }}", HELLO, 'refuses the messages'),  # it reaches its variables alone
    ('{{ messages.append(1) }}', HELLO, 'refuses the messages'),
    ('{% break %}', HELLO, having('tokenizer_config.json', 'chat template', "'break' outside loop")),
    ("{{ 'a' * 10**10 }}", HELLO, having('tokenizer_config.json', 'GiB of memory')),
    ("{{ 'a' * 10**8 }}", HELLO, having('tokenizer_config.json', 'characters')),
    ('{{ ' + '(' * 9000 + ')' * 9000 + ' }}', HELLO, having('tokenizer_config.json', 'cannot be read')),
  ],
)
def test_errors_of_chats_are_one_sentence(tmp_path, template, messages, match):
  with pytest.raises(ValueError, match=match) as info:
    _chatty(tmp_path, template).chat(messages)
  assert '\n' not in str(info.value)


@pytest.mark.parametrize(
  'template',
  [
    '{{ 9 ** (9 ** 9) }}',  # which is computed when the template is read
    '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}',
  ],
)
def test_a_template_has_limited_time_and_the_next_one_is_rendered(tmp_path, monkeypatch, template):
  monkeypatch.setattr(templates, 'SECONDS', 1)
  with pytest.raises(ValueError, match=having('tokenizer_config.json', 'more than 1 seconds')):
    _chatty(tmp_path, template).chat(HELLO)
  assert _text(tmp_path, '{{ messages[0].content }}') == 'the a'


def test_a_template_gets_values_alone(tmp_path):
  with pytest.raises(ValueError, match=having('chat_template_kwargs', 'lambda')):
    _text(tmp_path, 'a', mine=lambda: 1)


def test_both_formats_read_the_special_tokens_of_a_template(families, tmp_path):
  llama = families / 'gsm8k'
  found = []
  special = {'bos_token': '<s>', 'eos_token': '</s>'}
  for name, source in (('tokenizer.model', llama), ('tokenizer.json', llama / 'hf_tokenizer')):
    folder = tmp_path / name
    folder.mkdir()
    (folder / name).write_bytes((source / name).read_bytes())
    (folder / 'tokenizer_config.json').write_text(json.dumps(special | {'chat_template': TEMPLATE}))
    found.append(tokenizers.find(folder).chat(HELLO * 2))
  assert found[0] == found[1] and found[0][:2] != [1, 1] and found[0].count(1) == 1 and found[0].count(2) == 2


def test_a_token_that_the_vocabulary_lacks_is_named(tmp_path):
  added = {'9999': {'content': '<|turn|>'}}
  with pytest.raises(ValueError, match=r'<\|turn\|>'):
    _chatty(tmp_path, '<|turn|>a', added_tokens_decoder=added).chat(HELLO)


OPT = {'add_bos_token': True, 'bos_token': {'content': '</s>'}, 'eos_token': '</s>', 'pad_token': '<pad>'}
OPT |= {'before': ['<s>', '<pad>', '</s>']}


def test_older_byte_level_files_are_read(tmp_path):
  tokenizer = byte_level(tmp_path, **OPT)
  vocab = json.loads((tmp_path / 'vocab.json').read_text())
  assert tokenizer.encode('the') == [2, vocab['the']] and tokenizer.eos_ids == (2,)  # OPT begins with </s>
  assert tokenizer.encode('the', begins=False) == [vocab['the']]
  ids = tokenizer.encode(' the ☃')
  assert tokenizer.decode([*ids, 2, 1]) == ' the ☃'
  assert tokenizer.pieces() == list(vocab)
  assert len(tokenizer.files()) == 3


@pytest.mark.parametrize(
  'settings, ids',
  [
    ({'tokenizer_class': 'GPT2Tokenizer'}, ['he', 'Ġ', '12', '.', 'Ċ', 'Ċ', 'e', 'Ì', 'ģ']),
    ({'add_prefix_space': True}, ['Ġhe', 'Ġ', '12', '.', 'Ċ', 'Ċ', 'e', 'Ì', 'ģ']),
    ({'tokenizer_class': 'Qwen2Tokenizer'}, ['he', 'Ġ', '1', '2', '.', 'ĊĊ', 'Ã', '©']),
  ],
)
def test_byte_level_files_are_split_as_their_class_does(tmp_path, settings, ids):
  tokenizer = byte_level(tmp_path, merges=['1 2', 'Ċ Ċ', 'h e', 'Ġ he'], **settings)
  pieces = tokenizer.pieces()
  assert [pieces[i] for i in tokenizer.encode('he 12.\n\ne\u0301')] == ids  # as transformers 5.24 reads them


def test_a_class_of_byte_level_files_that_is_not_known_is_named(tmp_path):
  with pytest.raises(ValueError, match=having(str(tmp_path), 'WhisperTokenizer', 'use_fast=True')):
    byte_level(tmp_path, tokenizer_class='WhisperTokenizer').encode('the')


def test_a_character_of_bytes_stays_when_others_follow_that_are_not_whole(tmp_path):
  from tokenizers import decoders, models, Tokenizer

  pieces = ['</s>', 'a', *(f'<0x{byte:02X}>' for byte in range(256))]
  library = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
  library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
  library.add_special_tokens(['</s>'])
  library.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = tokenizers.load(tmp_path)
  ids = tokenizer.encode('aé😀é')
  texts = [tokenizer.decode([*ids[:n], 0]) for n in range(len(ids) + 1)]
  kept = ['', 'a', 'a', *['aé'] * 4, *['aé😀'] * 2, 'aé😀é']
  assert [text.rstrip('\ufffd') for text in texts] == kept and texts[-1] == 'aé😀é'
  assert tokenizer.decode([*ids[:2], 0], special=True) == 'a\ufffd</s>'


def test_byt5_needs_no_vocabulary(tmp_path):
  tokenizer = bare(tmp_path, tokenizer_class='ByT5Tokenizer', extra_ids=125)
  assert tokenizer.encode('aé') == [100, 198, 172, 1] and tokenizer.eos_ids == (1,)
  assert tokenizer.decode([100, 198, 172, 1, 0, 383]) == 'aé' and len(tokenizer.pieces()) == 384


def test_a_token_that_the_settings_name_is_special_whatever_its_own_entry_says(tmp_path):
  ends = {'1': {'content': '</s>', 'special': False}}  # as transformers writes a ByT5
  tokenizer = bare(tmp_path, tokenizer_class='ByT5Tokenizer', eos_token='</s>', added_tokens_decoder=ends)
  assert tokenizer.decode([100, 1]) == 'a' and tokenizer.decode([100, 1], special=True) == 'a</s>'


@pytest.mark.parametrize('name', ['tokenizer.json', 'spiece.model', 'vocab.json', 'tokenizer_config.json'])
def test_a_broken_or_missing_file_is_named(tmp_path, name):
  (tmp_path / 'merges.txt').write_text('')
  (tmp_path / name).write_text('garbage')
  with pytest.raises(ValueError, match=having(str(tmp_path / name))):
    tokenizers.find(tmp_path).encode('a')
  with pytest.raises(FileNotFoundError, match='gone.model'):
    tokenizers.Tokenizer(str(tmp_path / 'gone.model')).encode('a')


def _model(tokenizer, vocab_size, name):
  network = Network()
  network.vocab_size = vocab_size
  return Model({}, network, tokenizer, name)


def test_equal_vocabularies_pass_whatever_their_format_and_padding(families):
  model, fast = _pair(families, 'multi30k')
  assert tokenizers.check_vocabularies([_model(model, 6000, 'a'), _model(fast, 6144, 'b')]) == 6000
  assert tokenizers.check_vocabularies([_model(model, 6144, 'a'), _model(None, 6050, 'b')]) == 6000
  assert tokenizers.check_vocabularies([_model(None, 12, 'a'), _model(None, 10, 'b')]) == 10


def test_the_first_difference_is_named(families, tmp_path):
  t5, llama = _pair(families, 'multi30k')[0], _pair(families, 'gsm8k')[0]
  with pytest.raises(ValueError, match=having('id 0', "'<pad>' in small", 'spiece.model', "'<unk>' in draft")):
    tokenizers.check_vocabularies([_model(t5, 6000, 'small'), _model(llama, 4096, 'draft')])
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  a = byte_level(tmp_path / 'a', **OPT)
  b = byte_level(tmp_path / 'b', **OPT, after=['more'])
  models = [_model(a, 300, 'a'), _model(b, 300, 'b')]
  assert tokenizers.check_vocabularies(models) == len(a.pieces())  # the longer one goes on where the shorter one ends


def test_a_template_that_writes_half_a_character_is_named(tmp_path):
  tokenizer = _chatty(tmp_path, "{{ '\\ud800' }}{{ messages[0].content }}")
  with pytest.raises(ValueError, match=having('chat template', f'{tmp_path}', 'surrogate')):
    tokenizer.chat(HELLO)


def _with(folder, change):
  """Write a tokenizer.json after a change of its content."""
  _chatty(folder)
  file = folder / 'tokenizer.json'
  content = json.loads(file.read_text())
  change(content)
  file.write_text(json.dumps(content))
  return tokenizers.find(folder)


DOUBLES = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'aa'}
GROWING = (
  {'type': 'Sequence', 'normalizers': [DOUBLES] * 40},
  {'type': 'Sequence', 'normalizers': [{'type': 'Sequence', 'normalizers': [DOUBLES] * 20}] * 2},
  {'type': 'Replace', 'pattern': {'Regex': ''}, 'content': 'b' * (1 << 25)},
  {'type': 'Replace', 'pattern': {'Regex': '(?=a)'}, 'content': 'b' * (1 << 25)},
)


@pytest.mark.parametrize('normalizer', GROWING)
def test_a_normalizer_that_repeats_is_refused_before_the_library_runs_it(normalizer, tmp_path):
  tokenizer = _with(tmp_path, lambda content: content.update(normalizer=normalizer))
  with pytest.raises(ValueError, match=having(f'{tmp_path}/tokenizer.json', 'normalizer')):
    tokenizer.encode('a')


def test_a_normalizer_that_does_not_grow_is_run(tmp_path):
  steps = [{'type': 'Replace', 'pattern': {'Regex': '\\s+'}, 'content': ' '}] * 8
  tokenizer = _with(tmp_path, lambda content: content.update(normalizer={'type': 'Sequence', 'normalizers': steps}))
  assert tokenizer.encode('the  a') == tokenizer.encode('the a')


def test_a_text_longer_than_the_library_reads_is_refused(tmp_path, monkeypatch):
  tokenizer = _chatty(tmp_path)
  monkeypatch.setattr(tokenizer_formats, '_MOST_CHARACTERS', 100)
  assert tokenizer.encode('a' * 100)
  with pytest.raises(ValueError, match=having('tokenizer.json', '101 characters', '100')):
    tokenizer.encode('a' * 101)


@pytest.mark.parametrize('i', [4_000_000_000, -1, 1.5, '1', None, True])
def test_an_id_that_is_none_is_refused_before_the_library_makes_room_for_it(i, tmp_path):
  for change in (lambda c: c['model']['vocab'].update(x=i), lambda c: c['added_tokens'][0].update(id=i)):
    with pytest.raises(ValueError, match=having('tokenizer.json', f'{i!r}')):
      _with(tmp_path, change).encode('a')
  tokenizer = byte_level(tmp_path / 'vocab', **OPT) if (tmp_path / 'vocab').mkdir() is None else None
  file = tmp_path / 'vocab' / 'vocab.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'x': i}))
  with pytest.raises(ValueError, match=having('vocab.json', f'{i!r}')):
    tokenizer.encode('a')


def test_settings_that_change_are_read_again_and_so_is_a_vocabulary(tmp_path):
  tokenizer = byte_level(tmp_path, **OPT)
  before = tokenizer.encode('the')
  config = tmp_path / 'tokenizer_config.json'
  config.write_text(json.dumps(json.loads(config.read_text()) | {'add_bos_token': False}))
  after = tokenizers.find(tmp_path).encode('the')
  assert after != before and after == before[1:]
  (tmp_path / 'merges.txt').write_text('#version: 0.2\nt h\n')
  assert len(tokenizers.find(tmp_path).encode('the')) == len(after) + 1
