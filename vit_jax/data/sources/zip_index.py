"""Places of images in zip files, by their directories and the headers of their members. Labels and splits are those of
tar files, see `tar.py`.
"""

import functools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.record import BadImage
from vit_jax.data.sources.columns import FileColumns
from vit_jax.data.sources.ranges import open_to_scan
from vit_jax.data.sources.stored_index import Kind
from vit_jax.data.sources.tar_index import Member, describe_members
from vit_jax.data.sources.text import readable

SUFFIX = ".zip"
_HEADER = struct.Struct(
    "<26x2H"
)  # of a member; it ends with the bytes of the name and of extra fields
_ENCRYPTED = 1
_READ = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def inflate(content: bytes, size: int, name: str) -> bytes:
    """A member as it is without compression, of `size` bytes.

    Raises:
      BadImage: it is damaged.
    """
    try:
        image = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, size)
    except zlib.error as error:
        raise BadImage(name, f"it is damaged in the archive: {error}") from None
    if len(image) != size:
        raise BadImage(name, f"it has {len(image):,} of {size:,} bytes in the archive")
    return image


def _scan(file: places.File) -> FileColumns:
    """The columns of the images in a zip file."""
    try:
        with open_to_scan(file) as opened, zipfile.ZipFile(opened) as archive:
            return describe_members(file.path, _members(file.path, opened, archive))
    except ConfigError:
        raise
    except (zipfile.BadZipFile, ValueError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file.path} cannot be read as a zip file: {error!r}") from None


def _members(path: str, opened: BinaryIO, archive: zipfile.ZipFile) -> Iterator[Member]:
    for info in archive.infolist():
        if info.is_dir():
            continue
        is_encrypted = info.flag_bits & _ENCRYPTED
        if is_encrypted or info.compress_type not in _READ:
            state = "encrypted" if is_encrypted else "compressed by another method than deflate"
            raise ConfigError(
                f"{path}: {readable(info.filename)} is {state}: unpack the archive, and give the folder"
            )
        opened.seek(info.header_offset)
        name_size, extra_size = _HEADER.unpack(opened.read(_HEADER.size))
        first = info.header_offset + _HEADER.size + name_size + extra_size
        inflated = 0 if info.compress_type == zipfile.ZIP_STORED else info.file_size
        read = functools.partial(archive.read, info)
        yield Member(info.filename, first, info.compress_size, inflated, read)


KIND = Kind("zip 1", _scan)
