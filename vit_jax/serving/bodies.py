"""The bodies of requests, counted from the first byte that arrives until they are answered."""

import collections
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Iterator

from vit_jax.serving.limits import Refusal


class Bodies:
    """Bodies of all requests, of `most` bytes together.

    No client holds more than is free for the others: one alone half of all, one of two a third.
    """

    def __init__(self, most: int):
        self._most, self.held = most, 0
        self._of_client: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def of(self, client: str) -> Iterator["Body"]:
        """A body of a client, see `client_of`; it counts until the end of the `with` statement."""
        body = Body(self, client)
        try:
            yield body
        finally:
            self.add(body.client, -body.size)

    def add(self, client: str, size: int) -> None:
        """Counts bytes of a client. Raises `Refusal` if there is no room for them."""
        own, held = self._of_client[client] + size, self.held + size
        if size > 0 and own > self._most - held:
            raise Refusal(503, "too many images are being received: try again later")
        self.held, self._of_client[client] = held, own
        if not own:
            del self._of_client[client]


class Body:
    """One of them."""

    def __init__(self, bodies: Bodies, client: str):
        self.client, self.size, self._bodies = client, 0, bodies

    async def receive(self, chunks: AsyncIterator[bytes], most: int) -> bytes | None:
        """All of it; `None` if it has more than `most` bytes. Raises `Refusal` if there is no room for it."""
        received = []
        async for chunk in chunks:
            self._bodies.add(self.client, len(chunk))
            self.size += len(chunk)
            if self.size > most:
                return None
            received.append(chunk)
        return b"".join(received)


def client_of(address: str | None) -> str:
    """Who asks, by an address: of IPv6 the network that one customer has."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:  # a socket without addresses
        return ""
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
