"""Images as arrays of numbers: NumPy's `.npy` files, and how numbers of any type become bytes, and
one number of channels another.
"""

import io

import numpy as np
from absl import logging

from vit_jax.data.record import BadImage

NPY = b"\x93NUMPY"  # how such a file begins

_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

_MAX_16_BITS = 2**16 - 1
_FEW = 2**14  # an image of 16 bits without a value as high is nearly black, or uses fewer bits

LUMA = (19595, 38470, 7471)  # of red, green, blue: BT.601 times 2^16, as Pillow's mode L


def npy_header(image: bytes, name: str) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """(shape, type, whether columns come first, where the numbers begin) of a `.npy` file.

    Raises:
      BadImage: as `read_npy`.
    """
    file = io.BytesIO(image)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"its version is {version}")
        shape, in_columns, dtype = _NPY_HEADERS[version](file)
        if dtype.hasobject:  # bytes that NumPy would take for addresses
            raise TypeError(f"it holds {dtype}")
    except Exception as error:  # noqa: BLE001  NumPy reads a header as Python code: any error may come
        raise _damaged(name, error) from None
    return shape, dtype, in_columns, file.tell()


def read_npy(image: bytes, name: str) -> np.ndarray:
    """The array of a `.npy` file, as it is stored.

    Raises:
      BadImage: it is damaged, of a version after 2.0, or holds no numbers.
    """
    shape, dtype, in_columns, start = npy_header(image, name)
    try:
        pixels = np.frombuffer(image, dtype, offset=start)
        return pixels.reshape(shape, order="F" if in_columns else "C")
    except ValueError as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> BadImage:
    return BadImage(name, f"it is no whole .npy file of numbers ({str(error)[:200]})")


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """(H, W, …) as it is to be seen; `orientation` is that of EXIF and TIFF, 1 to 8."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    down = orientation in (3, 4, 7, 8)
    across = orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if across else 1]


def to_bytes(samples: np.ndarray, name: str, max_value: int = 0) -> np.ndarray:
    """(H, W) or (H, W, C) of any type -> (H, W, C) uint8.

    uint8 stays; of uint16 the highest 8 bits are taken; bool is 0 and 255; floats in [0, 1] are
    multiplied by 255 and rounded.

    Args:
      samples: the numbers of an image.
      name: of the image, for errors.
      max_value: the largest value that 16 bits hold in this data, 4095 where 12 of them are used;
        0: 65535, with a warning where an image has no value of 2^14 or more.

    Raises:
      BadImage: it has another type, another number of dimensions, or values that would become black
        or wrong.
    """
    if samples.ndim == 2:
        samples = samples[..., None]
    if samples.ndim != 3 or not samples.size:
        raise BadImage(name, f"its shape {samples.shape} is not (height, width, channels)")
    kind = samples.dtype.kind
    size = samples.dtype.itemsize
    if samples.dtype == np.uint8:
        return samples
    if samples.dtype == np.bool_:
        return samples * np.uint8(255)
    if kind == "u" and size == 2:
        return _highest_bits(samples, name, max_value)
    if kind == "f":
        low = float(samples.min())
        high = float(samples.max())
        if not (low >= 0 and high <= 1):  # nor if they are not numbers
            raise BadImage(
                name,
                f"its values go from {low:g} to {high:g}: floats must lie within 0 (black) and 1 "
                "(white); scale them",
            )
        return np.rint(samples * 255).astype(np.uint8)
    raise BadImage(name, f"it holds {samples.dtype}: store uint8, uint16, or floats within 0 and 1")


def _highest_bits(samples: np.ndarray, name: str, max_value: int) -> np.ndarray:
    """`to_bytes` of uint16."""
    high = int(samples.max())
    levels = (max_value or _MAX_16_BITS) + 1
    if max_value and high > max_value:
        raise BadImage(
            name,
            f"its values go to {high}, above config.data.max_value = {max_value}: set the largest "
            "value of all images",
        )
    if high > 0 and high * 256 < levels:
        raise BadImage(
            name,
            f"its values go to {high} of {levels - 1}, so that all of them would become black: set "
            "config.data.max_value to the largest value of all images, or store them as 8 bits",
        )
    if not max_value and 0 < high < _FEW:
        _warn_of_few_bits(name, high)
    if levels == _MAX_16_BITS + 1:
        return (samples >> 8).astype(np.uint8)
    return (samples.astype(np.uint32) * 256 // levels).astype(np.uint8)


_warned_of: set[int] = set()  # numbers of bits


def _warn_of_few_bits(name: str, high: int) -> None:
    """Warns that images of 16 bits may use fewer: of the first such image, and of one that uses more bits."""
    bits = high.bit_length()
    if bits <= max(_warned_of, default=0):
        return
    _warned_of.add(bits)
    logging.warning(
        "the values of %s go to %d of the 65535 that 16 bits have: nearly black. If the data uses %d bits, set "
        "--config.data.max_value=%d, its largest value; set 65535 if it is as dark as that", name, high, bits,
        2**bits - 1,
    )  # fmt: skip


def with_channels(pixels: np.ndarray, channels: int, name: str) -> np.ndarray:
    """(H, W, C) uint8 with the number of channels that is wanted: grey becomes RGB by repeating it,
    RGB grey by its luma; nothing else is changed.

    Raises:
      BadImage: it has another number of channels.
    """
    pixel_channels = pixels.shape[2]
    if pixel_channels == channels:
        return pixels
    if (pixel_channels, channels) == (1, 3):
        return np.repeat(pixels, 3, axis=2)
    if (pixel_channels, channels) == (3, 1):
        luma = pixels.astype(np.uint32) @ np.array(LUMA, np.uint32)
        return ((luma + 2**15) >> 16).astype(np.uint8)[..., None]
    raise BadImage(
        name,
        f"it has {pixel_channels} channels (its shape is {pixels.shape}), and config.data.channels is {channels}",
    )
