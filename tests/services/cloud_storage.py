"""A server of Cloud Storage's interface that keeps objects in memory: `python cloud_storage.py`
prints its address and serves until it is stopped.

It is gcp-storage-emulator with what clients here need beyond it: conditions on generations, which
TensorStore relies on where several writers share a file, and renaming.
"""

import functools
import http.server
import logging

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import Storage

_MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<new_id>.+)$"


class _Memory(Storage):
    """Objects of which no index is written at each change: that would take longer with each one."""

    def _write_config_to_file(self):
        pass


def _move(request, response, storage, *_):
    name, old, new = (request.params[k] for k in ("bucket_name", "object_id", "new_id"))
    response.json(objects._copy(request.base_url, storage, name, old, name, new))
    storage.delete_file(name, old)


def _with_generations(handler):
    """The handler of a request, run if the object has the generation that the request asks for."""

    def handle(request, response, storage, *arguments):
        name = request.params.get("object_id") or request.query.get("name", [""])[0]
        found = storage.objects.get(request.params.get("bucket_name"), {}).get(name, {})
        generation = found.get("generation", "0")
        if request.query.get("ifGenerationMatch", [generation])[0] != generation:
            response.status = server.HTTPStatus.PRECONDITION_FAILED
        elif request.query.get("ifGenerationNotMatch", [""])[0] == generation:
            response.status = server.HTTPStatus.NOT_MODIFIED
        else:
            handler(request, response, storage, *arguments)
            if found:
                response["x-goog-generation"] = generation

    return handle


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    server.HANDLERS = [
        (route, {method: _with_generations(handler) for method, handler in handlers.items()})
        for route, handlers in ((_MOVE, {"POST": _move}), *server.HANDLERS)
    ]
    request_handler = functools.partial(server.RequestHandler, _Memory(use_memory_fs=True))
    http.server.HTTPServer.request_queue_size = 1024  # one thread answers hundreds of readers
    with http.server.HTTPServer(("127.0.0.1", 0), request_handler) as serving:
        print(f"http://127.0.0.1:{serving.server_address[1]}", flush=True)
        serving.serve_forever()
