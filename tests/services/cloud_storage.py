"""A server of Cloud Storage's interface that keeps objects in memory: `python cloud_storage.py`
prints its address and serves until it is stopped.
"""

import functools
import http.server
import logging

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import Storage

_MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<new_id>.+)$"


def _move(request, response, storage, *_):
    """The request by which gcsfs renames a file; the emulator can copy and remove."""
    name, old, new = (request.params[k] for k in ("bucket_name", "object_id", "new_id"))
    response.json(objects._copy(request.base_url, storage, name, old, name, new))
    storage.delete_file(name, old)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    server.HANDLERS = ((_MOVE, {"POST": _move}), *server.HANDLERS)
    handler = functools.partial(server.RequestHandler, Storage(use_memory_fs=True))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as serving:
        print(f"http://127.0.0.1:{serving.server_address[1]}", flush=True)
        serving.serve_forever()
