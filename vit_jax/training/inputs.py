"""Prepares the inputs of a step on the devices: augmented images, targets, and the keys of its random choices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning
from vit_jax.config import Config
from vit_jax.data import views
from vit_jax.data.augmentation import pipeline
from vit_jax.data.augmentation.augment import permuted
from vit_jax.models.contract import images_of, size_and_patch
from vit_jax.objectives.contract import Batch
from vit_jax.objectives.networks import Networks
from vit_jax.training.state import TrainState

Images = dict[str, Any]  # by their names in the batch
Targets = dict[str, Any]


def seed_key(config: Config) -> jax.Array:
    """The key of all random choices of a run's steps, as uint32 (2,): an argument of its program, which so is the
    same for every seed.
    """
    return jax.random.key_data(jax.random.key(config.seed))


def prepare_inputs(
    networks: Networks, state: TrainState, batch: Batch, config: Config, seed: jax.Array
) -> tuple[Images, Targets, jax.Array]:
    """Makes the inputs of a step. Every random choice is a function of (seed, step): a resumed run repeats none and
    skips none.

    Args:
      networks: the run's, for the devices that are traced for.
      state: before the step.
      batch: see `data.batches.spec`.
      config: the run's.
      seed: from `seed_key`.

    Returns:
      The augmented images, the targets that the objective makes of the labels, and the key of all other random
      choices of the step.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(seed), state.step)
    augment_key, model_key = jax.random.split(key)
    targets = networks.objective.targets(batch)
    augment_batch = _augmentation_of(config)
    images, targets = augment_batch(networks, batch, targets, augment_key, config)
    images = jax.tree.map(partitioning.constrain_batch, images)
    return images, targets, model_key


def _augmentation_of(config: Config) -> Callable[..., tuple[Images, Targets]]:
    """The function that augments batches of the run's layout."""
    if views.of(config):
        return _augment_views
    if config.data.native_tokens:
        return _augment_patches
    return _augment_images


def _augment_images(
    networks: Networks, batch: Batch, targets: Targets, key: jax.Array, config: Config
) -> tuple[Images, Targets]:
    """Images of one size, one of each example."""
    size, _ = size_and_patch(batch["image"].shape)
    image = batch["image"].reshape(-1, *size, config.data.channels)
    normalization = _normalization(networks, config)
    image, targets = pipeline.augment(image, targets, key, config.augment, **normalization)
    if networks.objective.needs_masks:
        targets = pipeline.move(targets, key, config.augment)
    return {"image": permuted(image, config.data)}, targets


def _augment_views(
    networks: Networks, batch: Batch, targets: Targets, key: jax.Array, config: Config
) -> tuple[Images, Targets]:
    """Several crops of each example."""
    from vit_jax.data import several_views

    normalization = _normalization(networks, config)
    images = several_views.augment_views(batch, views.of(config), key, **normalization)
    return images, targets


def _augment_patches(
    networks: Networks, batch: Batch, targets: Targets, key: jax.Array, config: Config
) -> tuple[Images, Targets]:
    """Images of any size, as patches."""
    from vit_jax.data.augmentation import patches

    layout = patches.Patches(config.data.channels)
    image, targets = pipeline.augment(
        images_of(batch),
        targets,
        key,
        config.augment,
        layout=layout,
        **_normalization(networks, config),
    )
    return {"image": image}, targets


def _normalization(networks: Networks, config: Config) -> dict[str, Any]:
    return {
        "mean": config.data.mean,
        "std": config.data.std,
        "dtype": jnp.dtype(networks.model_config.dtype),
    }
