"""Programs that test what a model wrote, in six languages.

A program is Python for `speccascade.data.sandbox`; of another language it writes the source and calls the language's
own tools, with its standard library alone.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import re
import shutil
from typing import Any

from speccascade.data.examples import Example

PYTHON = 'python'
LIMITS = {  # of other languages than Python
  'seconds': 30.0,  # of processor time, for a compiler and what it made
  'memory': 1 << 35,  # bytes of address space, of which these runtimes reserve far more than they use
  'processes': 128,  # threads included
}
_FENCE = re.compile(r'```[^\n`]*\n(.*?)(?:```|\Z)', re.DOTALL)
_GO_IMPORT = re.compile(r'^import\s*(?:\((.*?)\)|("[^"]*"))', re.DOTALL | re.MULTILINE)
_GO_PACKAGES = ('bytes', 'crypto/md5', 'fmt', 'math', 'math/rand', 'regexp', 'sort', 'strconv', 'strings', 'time')
_GO_ASSERT = """
type asserts struct{ t *testing.T }
type asserting struct{}

var assert asserting

func (asserting) New(t *testing.T) asserts { return asserts{t} }

func (a asserts) check(ok bool) {
	if !ok {
		a.t.Fail()
	}
}

func (a asserts) Equal(want, value interface{}, _ ...interface{})    { a.check(reflect.DeepEqual(want, value)) }
func (a asserts) NotEqual(want, value interface{}, _ ...interface{}) { a.check(!reflect.DeepEqual(want, value)) }
func (a asserts) True(value bool, _ ...interface{})                  { a.check(value) }
func (a asserts) False(value bool, _ ...interface{})                 { a.check(!value) }
func (a asserts) Nil(value interface{}, _ ...interface{})            { a.check(value == nil) }
"""
_JS_ASSERT = 'console.assert = (ok, ...words) => { if (!ok) throw new Error(words.join(" ")) }\n'
_RUST_CRATES = re.compile(r'^use (?:rand|regex|md5)\b.*;$\n?', re.MULTILINE)
_JAVA = ('-XX:+UseSerialGC', '-XX:TieredStopAtLevel=1', '-Xmx1g')


@dataclasses.dataclass(frozen=True)
class Language:
  """How a language is run.

  Attributes:
    file: name of the source file.
    commands: what is run in turn; each has to succeed. The first word is a tool, or a file that another command made.
    smallest: a source that every installation can run.
    source: (info of the example, completed function) -> source.
  """

  file: str
  commands: Sequence[Sequence[str]]
  smallest: str
  source: Callable[[Mapping[str, Any], str], str]


def _plain(info: Mapping[str, Any], function: str) -> str:
  return f'{function}\n{info["test"]}'


def _go(info: Mapping[str, Any], function: str) -> str:
  """Return a source with the packages that it uses, for others are errors, and with assertions like testify's."""
  setup = info.get('test_setup', '')
  listed = re.findall(r'"([^"]*)"', ' '.join(''.join(m) for m in _GO_IMPORT.findall(setup + function)))
  code = _GO_IMPORT.sub('', f'{function}\n{info["test"]}') + _GO_ASSERT
  bare = re.sub(r'//.*', '', code)
  paths = sorted({path for path in (*listed, *_GO_PACKAGES, 'reflect', 'testing') if '.' not in path})
  used = [path for path in paths if re.search(rf'\b{path.split("/")[-1]}\.', bare)]
  imports = '\n'.join(f'\t"{path}"' for path in used)
  return f'package main\n\nimport (\n{imports}\n)\n{code.replace("package main", "")}'


LANGUAGES = {
  'js': Language(
    'program.js',
    [('node', 'program.js')],
    '0',
    lambda info, function: _JS_ASSERT + _plain(info, function),  # node prints failed assertions and goes on
  ),
  'java': Language(
    'Main.java',
    [('javac', *(f'-J{flag}' for flag in _JAVA), 'Main.java'), ('java', *_JAVA, '-ea', 'Main')],
    'public class Main { public static void main(String[] words) {} }',
    _plain,
  ),
  'go': Language('program_test.go', [('go', 'test', '-vet=off', 'program_test.go')], 'package main\n', _go),
  'cpp': Language(
    'program.cpp', [('g++', '-std=c++17', '-o', 'program', 'program.cpp'), ('./program',)], 'int main() {}', _plain
  ),
  'rust': Language(
    'program.rs',
    [('rustc', '--test', '--edition=2021', '-o', 'program', 'program.rs'), ('./program',)],
    '#[test] fn runs() {}',
    lambda info, function: _plain(info, _RUST_CRATES.sub('', function)),
  ),
}
NAMES = (PYTHON, *LANGUAGES)


def language_of(example: Example) -> str:
  """Return the language of an example's programs."""
  name = example.info.get('language', PYTHON)
  if name not in NAMES:
    raise ValueError(f'example {example.index}: there is no language {name!r}; choose from {", ".join(NAMES)}.')
  return name


def program(example: Example, prediction: str) -> str:
  """Return the Python program that tests a completion.

  Args:
    example: has `test`, `entry_point` and, if the prompt is not the beginning of the program, `prompt` in its info;
      of another language than Python also `language`.
    prediction: the completion. Of another language it ends at the first brace that is not indented. If it has a fenced
      block, only the block counts, and a block that defines the function replaces the prompt's.
  """
  name = language_of(example)
  start = example.info.get('prompt', example.prompt)
  if name == PYTHON:
    return _python(start, prediction, example.info['test'], example.info['entry_point'])
  fenced = _FENCE.search(prediction)
  code = fenced.group(1) if fenced else prediction
  if fenced and _defines(code, example.info['entry_point']):
    source = _with_the_setting_of(start, code)
  else:
    body, _, _ = code.partition('\n}')
    source = f'{start}{body}\n}}\n'
  return _driver(LANGUAGES[name], LANGUAGES[name].source(example.info, source))


def smallest(name: str) -> str:
  """Return a program that every installation of a language can run."""
  return _driver(LANGUAGES[name], LANGUAGES[name].smallest)


def _python(start: str, prediction: str, test: str, entry_point: str) -> str:
  """Return a prompt with its completion, the tests and their call, if there is an entry point to call them with.

  If the answer has a fenced block, only the block counts. A function that it defines anew replaces the prompt's.
  Sentencepiece drops the first space of a text, so an odd indentation of the first line lacks one space.
  """
  fenced = _FENCE.search(prediction)
  code = fenced.group(1) if fenced else prediction
  if not start:
    code = code.lstrip()
  indent = len(code) - len(code.lstrip(' '))
  if indent % 2:
    code = ' ' + code
  if entry_point and f'def {entry_point}(' in code:
    code = f'    pass\n\n{code}'
  call = f'check({entry_point})\n' if entry_point else ''
  return f'{start}{code}\n\n{test}\n\n{call}'


def _defines(code: str, function: str) -> bool:
  """Return whether code of a language with braces defines a function and does not only call it."""
  words = r'(?!\s*(?:return|if|else|for|while|switch|\}))'
  return re.search(rf'^{words}[^\n;{{]*\b{re.escape(function)}\b[^;{{]*\{{', code, re.MULTILINE) is not None


def _with_the_setting_of(start: str, code: str) -> str:
  """Return code with the imports of a prompt that it lacks, and in the prompt's class, if it has one."""
  setting = re.findall(r'^import\s*\((?s:.*?)\)|^(?:#include|using|use|import)\b.*', start, re.MULTILINE)
  enclosing = re.search(r'^class (\w+) \{', start, re.MULTILINE)
  if enclosing and not re.search(rf'\bclass {enclosing[1]}\b', code):
    code = f'{enclosing[0]}\n{code}\n}}'
  code = re.sub(r'^public (?=class\b)', '', code, flags=re.MULTILINE)  # a public class has a file of its own
  return '\n'.join([*(line for line in setting if line not in code), code])


def _driver(language: Language, source: str) -> str:
  """Return the Python program that writes a source and runs the commands of its language."""
  commands = [(_tool(words[0]), *words[1:]) for words in language.commands]
  folders = {os.path.dirname(words[0]) for words in commands} - {'.'}
  path = os.pathsep.join([*sorted(folders), '/usr/bin', '/bin'])
  rustup = os.environ.get('RUSTUP_HOME') or os.path.expanduser('~/.rustup')  # a program's own home is empty
  settings = {'PATH': path, 'RUSTUP_HOME': rustup, 'GOMAXPROCS': '2', 'GOPROXY': 'off'}
  return (
    'import os, subprocess\n'
    f'with open({language.file!r}, "w", encoding="utf-8") as f:\n  f.write({source!r})\n'
    f'os.environ |= {settings!r}\n'
    f'for words in {commands!r}:\n'
    '  ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")\n'
    '  if ran.returncode:\n    raise RuntimeError((ran.stderr or ran.stdout).strip()[-300:])\n'
  )


def _tool(name: str) -> str:
  """Return the path of a tool, or raise FileNotFoundError."""
  if name.startswith('./'):
    return name
  if (path := shutil.which(name)) is None:
    raise FileNotFoundError(
      f"no {name} on PATH to run programs with; install it, or take other metrics, as metrics=('exact_match',)."
    )
  return path
