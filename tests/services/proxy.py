"""A proxy that counts requests and injects faults: `python proxy.py UPSTREAM` prints its address.

PUT /_proxy/faults replaces the faults (`buckets.Faults` documents their fields), GET /_proxy/requests
returns [method, path] of each request since the last DELETE of it.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
import sys
import urllib.parse

import aiohttp
from aiohttp import web

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Proxy:
    """Forwards requests to one server.

    Attributes:
      requests: method and path of each, oldest first.
    """

    def __init__(self, upstream: str, session: aiohttp.ClientSession):
        self._upstream, self._session = upstream, session
        self.requests: list[tuple[str, str]] = []
        self._latency, self._faults, self._replaced = 0.0, [], asyncio.Event()

    async def control(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.requests)
        if request.method == "DELETE":
            self.requests.clear()
            return web.Response()
        content = await request.json()
        self._latency = content["latency_ms"] / 1000
        self._faults = [fault | {"seen": 0} for fault in content["faults"]]
        self._replaced.set()
        self._replaced = asyncio.Event()
        return web.Response()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path = request.path_qs + _uploaded_name(body)
        self.requests.append((request.method, path))
        await asyncio.sleep(self._latency)
        fault = self._next_fault(request.method, path) or {"kind": ""}
        match fault["kind"]:
            case "status":
                return web.Response(status=fault["status"], text="injected by the test")
            case "stall":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._replaced.wait(), fault["seconds"])
            case "delay":
                await asyncio.sleep(random.uniform(0, fault["seconds"]))
            case "reset":
                return _reset(request)
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        async with self._session.request(
            request.method,
            f"{self._upstream}{request.raw_path}",
            headers=headers,
            data=body or None,
            allow_redirects=False,
        ) as reply:
            content = await reply.read()
        if fault["kind"] == "lost":
            return _reset(request)
        if fault["kind"] == "late":
            await asyncio.sleep(random.uniform(0, fault["seconds"]))
        response = web.StreamResponse(status=reply.status, reason=reply.reason)
        for name, value in reply.headers.items():
            if name.lower() not in _HOP:
                response.headers.add(name, value)
        length = int(reply.headers.get("Content-Length", 0)) if request.method == "HEAD" else len(content)  # fmt: skip
        response.content_length = length
        await response.prepare(request)
        if fault["kind"] == "truncate" and content:
            await response.write(content[: len(content) // 2])
            request.transport.close()
            return response
        if request.method != "HEAD":
            await response.write(content)
        await response.write_eof()
        return response

    def _next_fault(self, method: str, path: str) -> dict | None:
        for fault in self._faults:
            wanted = re.search(fault["path"], urllib.parse.unquote(path))
            if wanted and method in fault["methods"]:
                fault["seen"] += 1
                turn = fault["seen"] - fault["after"]
                left = fault["times"] is None or turn <= fault["times"] * fault["every"]
                if left and turn > 0 and turn % fault["every"] == 0:
                    return fault
        return None


def _uploaded_name(body: bytes) -> str:
    """`&name=…` of an upload whose name is not in its query but in its body, as gcsfs writes it."""
    name = re.match(rb"--==0==.*?{\"name\": \"([^\"]*)\"", body[:4096], re.DOTALL)
    return f"&name={name[1].decode()}" if name else ""


def _reset(request: web.Request) -> web.Response:
    """Ends the connection with a TCP reset; what is returned goes nowhere."""
    connection = request.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
    return web.Response()


async def _serve(upstream: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        proxy = Proxy(upstream, session)
        application = web.Application(client_max_size=2**32)
        application.router.add_route("*", "/_proxy/{name}", proxy.control)
        application.router.add_route("*", "/{path:.*}", proxy.forward)
        runner = web.AppRunner(application, auto_decompress=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
