"""What a request may take, and how one that asks for too much is refused."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take.

    Attributes:
      megabytes: of an image's file, 10⁶ bytes each.
      seconds: until a body has arrived; and from then on, until it is answered.
      queue: images that have arrived and are not answered.
      images: of one request.
    """

    megabytes: float = 10.0
    seconds: float = 30.0
    queue: int = 256
    images: int = 64

    @property
    def bytes(self) -> int:
        """Of an image's file."""
        return int(self.megabytes * 1e6)


class Refusal(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status
