"""What a request may take, and how one that asks for too much is refused."""

import dataclasses
import io

from PIL import Image

_MOST_PIXELS = 2**26  # 192 MiB when decoded


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take.

    Attributes:
      megabytes: of an image's file, 10⁶ bytes each.
      seconds: until a body has arrived; and from then on, until it is answered.
      queue: images that have arrived and are not answered.
    """

    megabytes: float = 10.0
    seconds: float = 30.0
    queue: int = 256

    @property
    def bytes(self) -> int:
        """Of an image's file."""
        return int(self.megabytes * 1e6)


class Refusal(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


def check_pixels(body: bytes) -> None:
    """Raises `Refusal` for an image that would be too large when decoded, by what its head says."""
    try:
        with Image.open(io.BytesIO(body)) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise Refusal(413, f"the image has too many pixels: {error}") from None
    except (OSError, SyntaxError, ValueError):
        return  # none that Pillow knows
    if width * height > _MOST_PIXELS:
        raise Refusal(
            413, f"the image has {width} x {height} pixels, more than {_MOST_PIXELS:,} in all"
        )
