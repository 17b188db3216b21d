"""The models that self-distillation sees its views with: at the size of the global ones, of the local ones, and of
those that a Gram teacher sees; for each of the sizes that views have.
"""

import dataclasses
from collections.abc import Mapping

from vit_jax.base.errors import ConfigError
from vit_jax.data.several_views import AGAIN
from vit_jax.models.resized import check_resized, config_at
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import Batch, ObjectiveContext


@dataclasses.dataclass(frozen=True)
class ViewModels:
    """Configs of the model at the sizes of a batch's views.

    Attributes:
      shapes: (count, H, W, C) of an example's views, by name.
      names: of the global views.
      model: at their size.
      local: of the other views, by name.
      gram: at the size that a Gram teacher sees; `None` without one.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    model: PublishedViTConfig
    local: Mapping[str, PublishedViTConfig]
    gram: PublishedViTConfig | None

    def are_in(self, batch: Batch) -> bool:
        """Whether the views of a batch have these sizes."""
        return all(batch[name].shape[1:] == shape for name, shape in self.shapes.items())


def models_of(context: ObjectiveContext, *, with_gram: bool) -> tuple[ViewModels, ...]:
    """Those of a run: for the sizes of `config.data.views`, and for the others that some steps have.

    Args:
      with_gram: whether there is a Gram teacher.

    Raises:
      ConfigError: there are not two global views, or patches do not divide a size of views.
    """
    model = context.model
    size = (*model.height_width, model.channels)
    names = tuple(
        name
        for name, shape in context.views.items()
        if shape[1:] == size and not name.endswith(AGAIN)
    )
    count = sum(context.views[name][0] for name in names)
    if count != 2:
        raise ConfigError(
            f"objective dino needs two global views, of config.data.image_size, and config.data.views "
            f"has {count}"
        )
    again = [name for name in context.views if name.endswith(AGAIN)]
    if again and (not with_gram or sorted(again) != sorted(name + AGAIN for name in names)):
        raise ConfigError(
            "config.data.views: again is for both global views, and for a Gram teacher: set "
            "config.objective.gram_weight, and again of no other view"
        )
    all_shapes = [context.views, *context.other_views]
    return tuple(_models(model, shapes, names, with_gram) for shapes in all_shapes)


def _models(
    model: PublishedViTConfig,
    shapes: Mapping[str, tuple[int, ...]],
    names: tuple[str, ...],
    with_gram: bool,
) -> ViewModels:
    def at(name: str) -> PublishedViTConfig:
        sides = shapes[name][1:3]
        if sides == model.height_width:
            return model
        try:
            return config_at(model, sides)
        except ConfigError as error:
            view = name.removeprefix("image_").replace(AGAIN, ", cut again")
            raise ConfigError(f"config.data.views: view {view}: {error}") from error

    if len({shapes[name][1:] for name in names}) > 1:
        raise ConfigError(
            "config.data.view_sizes: the global views have different sizes: give both the same"
        )
    student = at(names[0])
    gram = at(names[0] + AGAIN) if names[0] + AGAIN in shapes else student
    local = {name: at(name) for name in shapes if name not in names and not name.endswith(AGAIN)}
    return ViewModels(shapes, names, student, local, gram if with_gram else None)


def check_models(
    model: PublishedViTConfig, all_models: tuple[ViewModels, ...], resize: str
) -> None:
    """Raises `ConfigError` if the model's positions cannot be interpolated to the sizes of views."""
    for views in all_models:
        gram = [views.gram] if views.gram else []
        for config in (views.model, *views.local.values(), *gram):
            try:
                check_resized(model, config, resize)
            except ConfigError as error:
                raise ConfigError(f"config.data.views: {error}") from error
