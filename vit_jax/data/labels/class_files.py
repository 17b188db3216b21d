"""Files of class names, one a line."""

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.text import read_text


def read_classes(path: str, where: str) -> tuple[str, ...]:
    """The names in a file, in their order.

    Args:
      path: of the file, local or in a bucket.
      where: the flag that names it, for messages: '--classes'.

    Raises:
      ConfigError: it is no file of text, or has no names.
    """
    file = places.locate(path, where)
    if not file.exists() or file.is_dir():
        raise ConfigError(f"{where}={path}: there is no such file{places.nearest_existing(file)}")
    names = tuple(line.strip() for line in read_text(file).splitlines() if line.strip())
    if not names:
        raise ConfigError(f"{where}={path} has no names: give one for each class, one a line")
    return names
