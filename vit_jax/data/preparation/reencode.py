"""Images made smaller once, so that every epoch decodes less; and what that costs and gains."""

import time

import cv2
import numpy as np
from PIL import Image

from vit_jax.data import crops
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.data.preparation.check import encoded
from vit_jax.data.record import Source

DEFAULT_QUALITY = 90
_SAMPLE = 64
_REPEATS = 3  # the fastest counts: machines have other things to do


def reencode(image: bytes, pixels: np.ndarray, max_side: int, quality: int) -> bytes:
    """`image`, or, where that is smaller, a JPEG of its `pixels` (H, W, 3) uint8.

    Args:
      max_side: the smaller side is shrunk to this many pixels (antialiased, Lanczos); images that
        are not larger stay as they are. 0: the size stays, every image is encoded again.
      quality: of the JPEG, 1 to 100; 0: `DEFAULT_QUALITY`.
    """
    height, width = pixels.shape[:2]
    if max_side:
        if min(height, width) <= max_side:
            return image
        scale = max_side / min(height, width)
        size = (round(width * scale), round(height * scale))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    options = [cv2.IMWRITE_JPEG_QUALITY, quality or DEFAULT_QUALITY]
    # A mark after each row of 16 x 16 pixels: the decoder jumps over those above a crop.
    options += [cv2.IMWRITE_JPEG_RST_INTERVAL, -(-pixels.shape[1] // 16)]
    again = cv2.imencode(".jpg", np.ascontiguousarray(pixels[..., ::-1]), options)[1].tobytes()
    return again if len(again) < len(image) else image


def measure(originals: Source, stored: Source, image_size: int = 224) -> dict[str, float]:
    """How much faster training crops are cut, and how far images are from the originals at the size
    that models see: the whole image in `image_size` squared, in dB of peak signal-to-noise ratio.

    Args:
      originals, stored: the same examples in the same order.
    """
    data = Data(image_size=image_size, eval_crop="resize")
    random, seconds, errors = np.random.default_rng(0), np.zeros(2), []
    for index in np.linspace(0, len(stored) - 1, min(_SAMPLE, len(stored))).astype(int).tolist():
        draws, whole = random.random(crops.DRAWS).tolist(), []
        for which, source in enumerate((originals, stored)):
            record, times = source[index], []
            image = encoded(record.image)
            for _ in range(_REPEATS):
                start = time.perf_counter()
                decode.train_crop(image, data, draws, name=record.name)
                times.append(time.perf_counter() - start)
            seconds[which] += min(times)
            whole.append(decode.eval_crop(image, data, name=record.name).astype(np.float32))
        errors.append(np.square(whole[0] - whole[1]).mean())
    psnr = 10 * np.log10(255**2 / np.maximum(errors, 1e-3))
    return {
        "decode_speed_up": round(float(seconds[0] / seconds[1]), 2),
        "psnr": round(float(psnr.mean()), 2),
        "psnr_worst": round(float(psnr.min()), 2),
    }
