"""Rotary positions of the patches: which kinds there are, and their angles for a model. What they do to
queries and keys is in `compute.rope`. Other tokens are not rotated, except registers with
`rope_registers`, which have a grid of their own.

  axial    integer rows and columns turn a half of each head's channels each (EVA-02, ViT-5).
  centred  the same with places from -1 to 1 along each side, whatever the resolution (DINOv3).
  mixed    rows and columns together, with frequencies that each layer and head learns (2403.13298).

At another resolution, axial ones count on, or with `rope_grid` spread the places of that grid.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute import rope
from vit_jax.models import classifier
from vit_jax.models.contract import PatchBatch

KINDS = ("none", "axial", "centred", "mixed")


def check_rotation(config: classifier.ClassifierConfig) -> None:
    """Raises `ConfigError` for heads whose channels cannot be turned; `config` is that of `vit_zoo`, here and
    below.
    """
    size = config.width // config.heads
    if config.rope != "none" and size % 4:
        raise ConfigError(
            f"model.rope={config.rope} turns pairs of channels by rows and by columns: heads of {size} "
            "channels, model.width / model.heads, cannot be split in four"
        )
    for name in ("rope_shift", "rope_jitter", "rope_rescale"):
        value = getattr(config, name)
        if value and config.rope != "centred":
            raise ConfigError(
                f"model.{name} = {value:g} moves places from -1 to 1, those of model.rope=centred, which is "
                f"{config.rope}"
            )
        if name != "rope_shift" and 0 < value < 1:
            raise ConfigError(
                f"model.{name} = {value:g}: factors are between 1/{name} and {name}, so it is at least 1; 0: none"
            )
    square = math.isqrt(config.registers) ** 2 == config.registers > 0
    if config.rope_registers and not (config.rope == "axial" and square):
        raise ConfigError(
            f"model.rope_registers={config.rope_registers:g} rotates registers that are a square grid: it needs "
            f"model.rope=axial, which is {config.rope}, and a square model.registers, which is {config.registers}"
        )


def variables(config: classifier.ClassifierConfig, rngs: nnx.Rngs) -> nnx.Param | None:
    """What a checkpoint has of them: frequencies (2, L, H, C/2) of columns and rows; `None` if nothing.

    They begin as those of `axial`, turned by a random angle for each layer and head (2403.13298 §3.2).
    """
    if config.rope != "mixed":
        return None
    size = config.width // config.heads
    lengths = config.rope_theta ** (-jnp.arange(size // 4) / (size // 4))
    turns = jax.random.uniform(rngs.params(), (config.depth, config.heads, 1), maxval=2 * math.pi)
    turns = jnp.concatenate([turns, turns + math.pi / 2], axis=-1)[..., None]
    both = jnp.stack([jnp.cos(turns), jnp.sin(turns)]) * lengths
    return nnx.Param(both.reshape(2, config.depth, config.heads, size // 2))


def angles(
    frequencies: nnx.Param | None,
    config: classifier.ClassifierConfig,
    key: jax.Array | None = None,
    native: PatchBatch | None = None,
) -> jax.Array | None:
    """The angles of all tokens: (T, 1, C/2), or where layers have their own (L, T, H, C/2); float32. Of images of
    sizes of their own (B, T, 1, C/2) or (L, B, T, H, C/2).

    Args:
      frequencies: from `variables`.
      key: randomness of the shift, jitter and rescaling of places, the same for all images; `None`: they stay.
      native: the images where they have sizes of their own.
    """
    if config.rope == "none":
        return None
    others = config.tokens_with_position + config.registers
    if native is None:
        table = _of_patches(frequencies, config)
    else:
        from vit_jax.models import native_sizes

        table = native_sizes.angles(native, frequencies, config)
    if config.rope == "centred" and key is not None:
        table = rope.moved(table, *_moves(config, key), theta=config.rope_theta)
    if config.rope != "mixed":
        table = table[..., None, :]
    if config.rope_registers:
        grid, size = (math.isqrt(config.registers),) * 2, config.width // config.heads
        registers = rope.axial_angles(grid, size, theta=config.rope_registers)[:, None]
        shape = (*table.shape[:-3], *registers.shape)
        table = jnp.concatenate([jnp.broadcast_to(registers, shape), table], axis=-3)
        others -= config.registers
    return jnp.pad(table, [(0, 0)] * (table.ndim - 3) + [(others, 0), (0, 0), (0, 0)])


def _of_patches(frequencies: nnx.Param | None, config) -> np.ndarray | jax.Array:
    """The angles of the patches of the model's own grid: (N, C/2), or (L, N, H, C/2)."""
    size, theta = config.width // config.heads, config.rope_theta
    match config.rope:
        case "mixed":
            return rope.mixed_angles(config.grid, frequencies[...])
        case "centred":
            return rope.centred_angles(config.grid, size, theta=theta)
    spread = config.rope_grid or None
    options = dict(theta=theta, offset=config.rope_offset, trained_grid=spread)
    return rope.axial_angles(config.grid, size, **options)


def _moves(config: classifier.ClassifierConfig, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A random shift and scale of rows and of columns (DINOv3): the shift uniform in ± `rope_shift`; the scale
    log-uniform between 1/`rope_jitter` and `rope_jitter` for each, times one for both by `rope_rescale`.
    """
    shift_key, jitter_key, rescale_key = jax.random.split(key, 3)
    shift = config.rope_shift * jax.random.uniform(shift_key, (2,), minval=-1)
    jitter, rescale = (math.log(x or 1.0) for x in (config.rope_jitter, config.rope_rescale))
    logarithms = jitter * jax.random.uniform(jitter_key, (2,), minval=-1)
    logarithms += rescale * jax.random.uniform(rescale_key, minval=-1)
    return shift, jnp.exp(logarithms)


def rotations(
    angles: jax.Array | None, *, by_layer: bool
) -> tuple[rope.Angles | None, rope.Angles | None]:
    """Cosines and sines as attention takes them: those of all layers, or with a leading axis for layers."""
    if angles is None:
        return None, None
    both = jnp.cos(angles), jnp.sin(angles)
    return (None, both) if by_layer else (both, None)


def with_joined(rotations: rope.Angles | None, tokens: int) -> rope.Angles | None:
    """Rotations (…, T, H, C/2) of `tokens` tokens: the first ones, which have none so far, are not turned."""
    if rotations is None or rotations[0].shape[-3] == tokens:
        return rotations
    cosines, sines = rotations
    edges = ((tokens - len(cosines), 0), (0, 0), (0, 0))
    return jnp.pad(cosines, edges, constant_values=1), jnp.pad(sines, edges)
