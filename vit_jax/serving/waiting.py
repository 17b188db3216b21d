"""The places of requests that have arrived and are not answered, shared among clients."""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from vit_jax.serving.limits import Refusal


@dataclasses.dataclass(eq=False)
class _Place:
    timeout: asyncio.Timeout
    is_lost: bool = False


class Waiting:
    """So many places. One client may have all of them while nobody else asks. Once they are taken, the latest request
    of the client with most places loses its own to a client with fewer.
    """

    def __init__(self, most: int, seconds: float):
        """`seconds` is how long a request may have its place."""
        self._most, self._seconds = most, seconds
        self._of_client: dict[str, list[_Place]] = collections.defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))

    def check(self, client: str) -> None:
        """Raises `Refusal` if there would be no place for another request of a client."""
        if len(self) >= self._most and not self._richer(client):
            raise Refusal(503, f"{len(self)} images wait for an answer: try again later")

    @contextlib.asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """A place for a request. Raises `Refusal` if there is none, or if it is lost or had for too long."""
        self.check(client)
        if len(self) >= self._most:
            lost = self._richer(client).pop()
            if not lost.timeout.expired():  # which it may be, and not yet have left
                lost.is_lost = True
                lost.timeout.reschedule(0)
        place = _Place(asyncio.timeout(self._seconds))
        self._of_client[client].append(place)
        try:
            async with place.timeout:
                yield
        except TimeoutError:
            why = f"no answer within {self._seconds:g} seconds"
            if place.is_lost:
                why = "others wait too, and you had most of the places"
            raise Refusal(503, f"{why}: try again later") from None
        finally:
            with contextlib.suppress(ValueError):  # it is lost
                self._of_client[client].remove(place)
            if not self._of_client[client]:
                del self._of_client[client]

    def _richer(self, client: str) -> list[_Place]:
        """The places of the client with most, if these are at least two more than `client` has; else none."""
        most = max(self._of_client.values(), key=len, default=[])
        return most if len(most) > len(self._of_client.get(client, ())) + 1 else []
