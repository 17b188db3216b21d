"""Connections whose bytes are no HTTP: these never become a request, and are answered, logged and counted all the same.

aiohttp has no hook for it: it would log a traceback and reply with a text that names its version.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

# A status and the reason, to the reply.
Refuse = Callable[[int, str], web.Response]


class Runner(web.AppRunner):
    """Runs an application whose connections are `_Connection`s."""

    def __init__(
        self, app: web.Application, refuse: Refuse, shutdown_timeout: float, **options: Any
    ):
        """
        Args:
          refuse: makes the reply to bytes that are no HTTP.
          shutdown_timeout: seconds that requests have to end when the server stops.
          **options: of `web.RequestHandler`.
        """
        super().__init__(app, shutdown_timeout=shutdown_timeout, **options)
        self._refuse = refuse
        self._options = options

    @property
    def server(self) -> Callable[[], "_Connection"] | None:
        """Makes a connection; `None` before `setup`."""
        return self._connect if super().server else None

    def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        return _Connection(super().server, self._refuse, loop=loop, **self._options)


class _Connection(web.RequestHandler):
    """A connection."""

    __slots__ = ("_refuse",)

    def __init__(self, manager: web.Server, refuse: Refuse, **options: Any):
        super().__init__(manager, **options)
        self._refuse = refuse

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Replies to bytes that are no HTTP."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        return self._refused(status, message or str(exc))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Replies also to what the application's handlers never see, such as an unknown Expect."""
        if isinstance(resp, web.HTTPException):
            resp = self._refused(resp.status, resp.reason)
        return await super().finish_response(request, resp, start_time)

    def _refused(self, status: int, why: str) -> web.Response:
        response = self._refuse(status, why)
        response.force_close()
        return response
