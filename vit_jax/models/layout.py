"""Where the tokens of a model are in the image, for any family: from its config and the shapes of what
it captures.
"""

import dataclasses

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier

SMALL = "small_"  # begins the names of what the small one of two branches gives


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of the attention weights of one name.

    Attributes:
      name: in `ModelOutput.intermediates`: `attention`, `small_attention`, `row_attention`, …
      grid: patches down and across among which is attended.
      size: height and width in pixels of what they cover.
      class_token: whether the first token is one, which the head reads.
    """

    name: str
    grid: tuple[int, int]
    size: tuple[float, float]
    class_token: bool

    @property
    def patches(self) -> int:
        """How many there are."""
        return self.grid[0] * self.grid[1]


def network(config: classifier.ClassifierConfig) -> classifier.ClassifierConfig:
    """The config of the network whose tokens the model gives: of a cascade its last exit's, of two
    branches the large one's.
    """
    if hasattr(config, "networks"):
        return config.networks[-1]
    return config.branches["large"] if hasattr(config, "branches") else config


def network_of(config: classifier.ClassifierConfig, name: str) -> classifier.ClassifierConfig:
    """The config of the network that gives what is captured under a name."""
    in_small = hasattr(config, "branches") and name.startswith(SMALL)
    return config.branches["small"] if in_small else network(config)


def grid(config: classifier.ClassifierConfig) -> tuple[int, int]:
    """Rows and columns of `ModelOutput.tokens`, the learned ones before them not counted.

    Raises:
      ConfigError: the family's config has no `grid`.
    """
    config = network(config)
    if hasattr(config, "grid"):
        return tuple(config.grid)
    if hasattr(config, "grids"):
        return tuple(config.grids[-1])
    raise ConfigError(
        f"{type(config).__name__} has no grid, so the places of its tokens in the image are unknown: its features "
        "cannot be maps; a family of yours tells its rows and columns by a property `grid` of its config"
    )


def has_grid(config: classifier.ClassifierConfig) -> bool:
    """Whether the family says where its tokens are."""
    config = network(config)
    return hasattr(config, "grid") or hasattr(config, "grids")


def has_class_token(config: classifier.ClassifierConfig) -> bool:
    """Whether the first token of a network, from `network_of`, is a class token, read by the head or not."""
    return bool(getattr(config, "has_class_token", getattr(config, "pool", "") == "token"))


def layouts(config: classifier.ClassifierConfig) -> dict[str, Layout]:
    """By the name of captured attention weights, also of those that the model does not have."""
    own, size = network(config), tuple(map(float, sizes.height_width(config.image_size)))
    rows, columns = grid(config)
    class_token = getattr(own, "pool", "token") in ("token", "token_mean")
    class_token = getattr(own, "class_token_attends", class_token)  # in the layers of patches
    all_layouts = [
        Layout("attention", (rows, columns), size, class_token),
        Layout("row_attention", (1, columns), (0.0, size[1]), False),
        Layout("column_attention", (rows, 1), (size[0], 0.0), False),
    ]
    if hasattr(config, "branches"):
        all_layouts.append(Layout("small_attention", config.branches["small"].grid, size, True))
    return {layout.name: layout for layout in all_layouts}
