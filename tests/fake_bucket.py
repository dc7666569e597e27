"""A server of Google's storage protocol on loopback, for the client that users have."""

import contextlib
from email.parser import BytesParser
from http import HTTPStatus
import os
import socket
from unittest import mock

os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'  # before gcsfs is imported: it would ask Google for more
BUCKET = 'bucket'


class _Parser(BytesParser):
  """A parser of uploads that keeps a last byte \\r, which it would take for a part of the end of line that follows."""

  def parsebytes(self, text, headersonly=False):
    header, uploaded = text.split(b'\r\n', 1)
    uploaded = uploaded.replace(b'\r\n--==0==', b'\r\r\n--==0==')
    return super().parsebytes(header + b'\r\n' + uploaded, headersonly)


@contextlib.contextmanager
def served(cache):
  """Serve an empty bucket, and let this process and those that it starts find it; copies are kept in `cache`."""
  from gcp_storage_emulator import server
  from gcp_storage_emulator.handlers import objects

  insert = objects.insert

  def checked(request, response, storage, *args, **kwargs):
    """Refuse to write over an object where the client asks for that, which this server does not know of itself."""
    wanted = request.query.get('ifGenerationMatch')
    name = request.query.get('name', [None])[0] or request.data['meta']['name']
    if wanted == ['0'] and _there(storage, request.params['bucket_name'], name):
      response.status = HTTPStatus.PRECONDITION_FAILED
      return None
    return insert(request, response, storage, *args, **kwargs)

  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  handlers = [(regex, {k: checked if h is insert else h for k, h in table.items()}) for regex, table in server.HANDLERS]
  found = {'STORAGE_EMULATOR_HOST': f'http://127.0.0.1:{port}', 'XDG_CACHE_HOME': str(cache)}
  quiet = mock.patch('http.server.HTTPServer.handle_error', lambda *_: None)  # clients that are killed hang up
  parser = mock.patch.object(server, 'BytesParser', _Parser)
  with mock.patch.object(server, 'HANDLERS', handlers), mock.patch.dict(os.environ, found), quiet, parser:
    running = server.create_server('127.0.0.1', port, in_memory=True, default_bucket=BUCKET)
    running.start()
    try:
      yield f'gs://{BUCKET}'
    finally:
      running.stop()


def _there(storage, bucket: str, name: str) -> bool:
  from gcp_storage_emulator.exceptions import NotFound

  try:
    storage.get_file_obj(bucket, name)
  except NotFound:
    return False
  return True
