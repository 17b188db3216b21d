"""A model at another image or patch size inside a compiled step: the same parameters, what depends on the sizes
fitted by matrices, so that gradients reach the parameters.

`classifier.ClassifierConfig.fit_parameter`, which this calls, fits a checkpoint to another size once, on the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.models import classifier, registry
from vit_jax.models.patch_kernels import patch_matrix

METHODS = ("torch", "dinov2")
SCHEDULED = (
    "bilinear"  # for a schedule of sizes: all of a table is learned, whichever size its images have
)


def config_at(
    config: classifier.ClassifierConfig, image_size: Size, patch: int = 0
) -> classifier.ClassifierConfig:
    """A model's config for images of another size, and patches of another if that is not 0. Raises `ConfigError` if
    patches do not divide it, or it has none.
    """
    options = config.options_for_image_size(image_size)
    if patch:
        reason = config.fixed_size_reason
        if reason or not hasattr(config, "patch"):
            raise ConfigError(f"it has one patch size alone: {reason or 'it has no patches'}")
        options["patch"] = patch
    return dataclasses.replace(config, **{"image_size": image_size} | options)


def check_resized(
    config: classifier.ClassifierConfig, target: classifier.ClassifierConfig, resize: str
) -> None:
    """Raises `ConfigError` if parameters that depend on the size cannot be interpolated; see `resized`. It traces both
    networks.
    """
    _fits(config, target, resize)


def resized(
    model: nnx.Module,
    config: classifier.ClassifierConfig,
    target: classifier.ClassifierConfig,
    resize: str,
) -> nnx.Module:
    """`model`, of `config`, at the image size of `target`, from `config_at`.

    Args:
      resize: how tables of positions are interpolated, see `embeddings.interpolate`.
    """
    fits = _fits(config, target, resize)

    def fit(name: str, x: jax.Array) -> jax.Array:
        exact = jax.lax.Precision.HIGHEST
        match fits.get(name):
            case None:
                return x
            case tuple((rows, columns)):  # of a kernel of patches
                return jnp.einsum("pP,qQ,PQcd->pqcd", rows, columns, x, precision=exact)
            case fit if fit.ndim == 3:
                return jnp.asarray(fit, x.dtype)
            case fit:
                return jnp.einsum("nr,brd->bnd", fit, x, precision=exact)

    weights = registry.split(model)[1]
    definition = registry.abstract(target)[0]
    return nnx.merge(definition, *(patterns.map_named(fit, tree) for tree in weights))


def spread_sines(model: nnx.Module, config: classifier.ClassifierConfig) -> None:
    """Has a model at another size spread the computed positions of `config` over its patches, where it has such."""
    if hasattr(model, "places"):
        model.places = config.grid


def tables(
    config: classifier.ClassifierConfig, target: classifier.ClassifierConfig, resize: str
) -> frozenset[str]:
    """Names of the arrays that `resized` interpolates or computes."""
    return frozenset(_fits(config, target, resize))


@functools.lru_cache(maxsize=16)
def _fits(
    config: classifier.ClassifierConfig, target: classifier.ClassifierConfig, resize: str
) -> dict[str, np.ndarray | tuple[np.ndarray, np.ndarray]]:
    """By name of a table (1, rows, D), the matrix (new rows, rows) float32 that resizes it; or the table (1, new rows,
    D), where that is computed for a size. Of a kernel of patches (P, Q, C, D) the two matrices of its sides.
    """
    trees = [registry.abstract_weights(model_config)[1] for model_config in (config, target)]
    by_name = {}
    for old, new in zip(*trees, strict=True):
        for name, before, after in zip(
            patterns.names(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True
        ):
            step = config.fit_parameter(name, target, resize=resize)
            if before.shape == after.shape and step is None:
                continue
            if step and name == "embedding/kernel":
                sides = zip(after.shape[:2], before.shape[:2], strict=True)
                both = [patch_matrix(*side, resize).astype(np.float32) for side in sides]
                by_name[name] = tuple(both)
                continue
            in_layers = patterns.is_stacked(name)
            if step is None or in_layers or len(before.shape) != 3 or before.shape[0] != 1:
                raise ConfigError(
                    f"a model for images of {sizes.size_text(config.image_size)} cannot see those of "
                    f"{sizes.size_text(target.image_size)}: {name} {before.shape} cannot be interpolated to "
                    f"{after.shape} in each step"
                )
            computed = step[1](np.zeros(before.shape))
            if computed.any():
                by_name[name] = computed.astype(np.float32)
                continue
            # Else the fit is linear in the rows of a table, and the same for each of its columns.
            (matrix,) = step[1](np.eye(before.shape[1])[None])
            by_name[name] = matrix.astype(np.float32)
    return by_name
