"""The Python API: a trained model that classifies images, gives features, is evaluated, saved, exported and
pushed. Each call is what the command of its name runs; the package's top level has all public names.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import evaluation
from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.base.sizes import Size
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.augmentation import augment
from vit_jax.data.record import BadImage
from vit_jax.evaluation import suites
from vit_jax.evaluation.forward import data_of
from vit_jax.evaluation.run import evaluate_run
from vit_jax.export import run as exporting
from vit_jax.interchange import (
    file_header,
    formats,
    loading,
    pushing,
    saved_objectives,
    tensors_by_name,
)
from vit_jax.interchange.listing import list_models  # noqa: F401  its earlier place
from vit_jax.interchange.loading import create_model  # noqa: F401
from vit_jax.models import registry
from vit_jax.prediction import overrides, predict
from vit_jax.prediction.features import Wanted, at_size, compile_features, compute_features
from vit_jax.prediction.images import (
    Compiled,
    ImageFile,
    ImageLike,
    Pixels,
    in_few_sizes,
    named_images,
    some_images,
)
from vit_jax.prediction.maps import Segmented, Segmenter, segment
from vit_jax.prediction.predict import Prediction
from vit_jax.prediction.transform import Transform

if TYPE_CHECKING:
    from vit_jax.annotations import (
        CheckpointFormat,
        ComputeOptions,
        EvaluateFields,
        ExportOptions,
        PreprocessingOptions,
        PushOptions,
    )  # fmt: skip

_BATCH = 32  # images at a time


@dataclasses.dataclass
class Run(TrainedModel):
    """A trained model and what is needed to use it, from `load_run`.

    Attributes:
      model: an NNX module with its parameters loaded (the averaged ones, if the run kept an average).
      model_config: the family's config.
      config: the run's.
      classes: label names, in the order of the logits.
      step: steps trained.
      directory: of the checkpoint.
      source: what `load_run` was called with.
      stated: options of the model, and names of its classes, that were passed to `load_run`.
    """

    source: str = ""
    stated: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        of_pixels = len(self.classes) if self.objective_modules else 0
        name = formats.describe_model(
            self.model_config, self.config.model.name, of_pixels=of_pixels
        )
        return f"<{self.source}: {name}, step {self.step:,}>"

    @overload
    def __call__(
        self, images: ImageFile, *, topk: int = 5, thresholds: Sequence[float] = ()
    ) -> Prediction: ...
    @overload
    def __call__(
        self, images: Pixels, *, topk: int = 5, thresholds: Sequence[float] = ()
    ) -> Any: ...
    @overload
    def __call__(
        self, images: Iterable[ImageLike], *, topk: int = 5, thresholds: Sequence[float] = ()
    ) -> list[Prediction]: ...
    def __call__(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        topk: int = 5,
        thresholds: Sequence[float] = (),
    ) -> Prediction | list[Prediction]:
        """Classifies one image, or several.

        >>> run("cat.jpg").names[0]
        'tabby, tabby cat'

        Args:
          images: a path, the bytes of a file, an open file (`BytesIO` too), an image of Pillow, or an array (H, W, C)
            or (H, W) (uint8, or floats in [0, 1]); or a list of these, of any sizes; or an array (n, H, W, C).
          topk: how many classes, the most probable ones.
          thresholds: how probable the best class has to be for an image to leave at each exit but the last, of a
            model with exits; none: all images go through to the last one.

        Returns:
          A `Prediction` with `names` and `probabilities`, best first; of several images a list of them.

        Raises:
          BadImage: an image cannot be read.
          ConfigError: something is no image, the model has no head, or it is not known how images are normalised.
        """
        if topk < 1:
            raise ConfigError(f"topk={topk}: must be 1 or more")
        given, alone = named_images(images)
        answers: list[Prediction] = []
        for part in in_few_sizes(given, _BATCH):
            answered = predict.predict(
                self, part, topk=topk, batch_size=min(len(part), _BATCH), thresholds=thresholds, best=self._best
            )  # fmt: skip
            answers += map(_raise_if_bad, answered)
        return answers[0] if alone else answers

    @overload
    def segment(self, images: ImageFile, *, windows: str | None = None) -> Segmented: ...
    @overload
    def segment(self, images: Pixels, *, windows: str | None = None) -> Any: ...
    @overload
    def segment(
        self, images: Iterable[ImageLike], *, windows: str | None = None
    ) -> list[Segmented]: ...
    def segment(
        self, images: ImageLike | Iterable[ImageLike], *, windows: str | None = None
    ) -> Segmented | list[Segmented]:
        """The class of every pixel of an image, or of several in a list; of a model that was trained to segment.

        >>> run.segment("street.jpg").overlay().show()

        Args:
          images: as for a call; raises as that does.
          windows: whole or sliding; by default as in the run's evaluation.
        """
        given, alone = named_images(images)
        segmented = segment(
            self._segmenter(windows), given, batch_size=min(len(given), _BATCH) or 1
        )
        answers = list(map(_raise_if_bad, segmented))
        return answers[0] if alone else answers

    def preprocess(self, images: ImageLike | Iterable[ImageLike]) -> np.ndarray:
        """Images as the model takes them: (n, H, W, C) float32, cut, resized and normalised.

        >>> run.model(run.preprocess("cat.jpg")).logits

        Args:
          images: as for a call; one image is n = 1.
        """
        data, given = self._data, some_images(images)
        pixels = np.stack([image.read(data) for image in given])
        return np.asarray(augment.prepared(jnp.asarray(pixels), data, jnp.dtype(jnp.float32)))

    @functools.cached_property
    def transform(self) -> Transform:
        """`preprocess` for one image, on the host: a path, the bytes of a file, an image of Pillow or an array to
        (H, W, C) float32, as a loader of another library calls it.

        >>> torchvision.datasets.ImageFolder("photos", transform=run.transform)
        """
        return Transform(self._data)

    def features(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        layers: Sequence[int | str] = (),
        maps: bool = False,
        norm: bool = True,
        class_token: bool = False,
        image_size: Size | str | None = None,
        stride: int = 0,
        native_tokens: int | None = None,
    ) -> np.ndarray | tuple:
        """Features of images: the input of the head, or the outputs of layers.

        Args:
          images: as for a call; one image is n = 1.
          layers: numbers of blocks from 0, or from the end if negative: (3, 7, 11); or names: 'small_blocks/2' of a
            CrossViT, 'stage3' of a ResNet.
          maps: the layers' patches as maps (n, h, w, D), instead of all tokens (n, N, D).
          norm: the outputs of layers after the model's last norm; False: as the layers give them.
          class_token: each layer as two arrays: its patches (n, N, D) or map, and its class token (n, D), or None of
            a model without one.
          image_size: of the images as the model sees them, where it should be another: positions are interpolated.
          stride: in place of that, windows of the model's own size slide over images of `image_size`, this many
            pixels from one to the next; where they overlap, their features are averaged.
          native_tokens: images at sizes of their own, of so many patches, maps as lists; None: as in the run; 0: none.

        Returns:
          (n, D) float32; with `layers` a tuple of (n, N, D) or (n, h, w, D) for each, or of pairs.

        Raises:
          BadImage: an image cannot be read.
          ConfigError: there is no such layer, it is no map, or the model takes no images of that size.
        """
        if isinstance(layers, int | str):
            raise ConfigError(f"layers={layers!r}: must be a list, such as [{layers!r}]")
        size = None if image_size is None else sizes.parse(image_size)
        wanted = Wanted(tuple(layers), maps, norm, size, stride, native_tokens)
        run, compiled = self._feature_program(wanted)
        given = some_images(images)
        batches = []
        for part in in_few_sizes(given, _BATCH):
            for _, arrays, bad in compute_features(run, part, min(len(part), _BATCH), compiled):
                if bad:
                    raise bad[0]
                batches.append(arrays)
        pooled, of_layers = jax.tree.map(
            lambda *arrays_of_batches: np.concatenate(arrays_of_batches), *batches
        )
        if not layers:
            return pooled
        if class_token:
            return tuple((x.map if maps else x.patches, x.class_token) for x in of_layers)
        return tuple(x.map if maps else x.tokens for x in of_layers)

    def evaluate(
        self,
        data: epath.PathLike = "",
        *,
        suite: str = "",
        data_dir: str = "",
        **fields: "Unpack[EvaluateFields]",
    ) -> dict[str, float]:
        """Metrics on a data set, as `vit_jax evaluate` finds them.

        >>> run.evaluate("photos", suite="classification", eval__batch_size=64)

        Args:
          data: a folder of class folders, what `vit_jax prepare` wrote, or the name of a data set; by default that
            which the run was trained on.
          suite: an evaluator (accuracy, classification, few_shot, knn, …), or, without `data`, a suite of data sets:
            imagenet, few_shot or knn.
          data_dir: where the data sets of a suite are.
          **fields: of the config, their dots as two underscores: `data__eval_split="validation"`.

        Raises:
          ConfigError: there is no such data set, suite or field, or it does not go with the model.
        """
        of_data = overrides.fields_of_data(data)
        named = {name.replace("__", "."): value for name, value in fields.items()} | of_data
        changes = [(n, v if isinstance(v, str) else repr(v)) for n, v in named.items()]
        of_sets = suite in suites.SUITES and not data
        if suite and not of_sets:
            if suite not in evaluation.EVALUATORS:
                known = dict.fromkeys((*evaluation.EVALUATORS, *suites.SUITES))
                raise ConfigError(
                    f"there is no suite or evaluator {suite!r}{nearest(suite, known)}"
                )
            changes.append(("eval.evaluators", repr((suite,))))
        config, options, fit = overrides.config_to_evaluate(
            self.source, changes, self.stated, needs_data=not of_sets
        )
        run = self
        if options:
            run = loading.load_run(self.source, model_options=self.stated, **options)
        run = overrides.at_sizes(run, config, fit)
        return evaluate_run(run, config, suite=suite if of_sets else "", data_dir=data_dir)[0]

    def save(
        self,
        path: epath.PathLike,
        *,
        format: "CheckpointFormat" = "orbax",
        **data: "Unpack[PreprocessingOptions]",
    ) -> None:
        """Writes the model as `vit_jax convert` does.

        Args:
          path: a file or folder.
          format: official, big_vision, timm, huggingface, authors or orbax (our own).
          **data: how images are prepared, where that should differ: mean, std, eval_crop, eval_resize, interpolation.

        Raises:
          CheckpointError: the format cannot express the model, or weights are not finite; nothing is written.
        """
        formats.module(format)
        formats.write_checkpoint(self._checkpoint(data), path, format)

    def export(self, path: str, **options: "Unpack[ExportOptions]") -> dict[str, Any]:
        """Writes the model as a program that runs without vit_jax, as `vit_jax export` does.

        Args:
          path: FILE.onnx, or FILE.zip for StableHLO.
          **options: `batch_size`, `normalization`, `precision` and `outputs` of `vit_jax.export.run.export`.

        Returns:
          The description of its input and output.
        """
        suffixes = {writer.SUFFIX: name for name, writer in exporting.FORMATS.items()}
        suffix = os.path.splitext(path)[1]
        if suffix not in suffixes:
            raise ConfigError(f"{path}: name the file {' or '.join(suffixes)}")
        return exporting.export_run(self, path, to=suffixes[suffix], **options)

    def push(self, repository: str, **options: "Unpack[PushOptions]") -> dict[str, Any]:
        """Uploads the model to the Hugging Face hub, as `vit_jax push` does.

        Args:
          repository: OWNER/NAME.
          **options: of `vit_jax.interchange.pushing.push`: `private`, `dry_run`, `format`, `license`, `overwrite`.

        Returns:
          The `url`, the `files` with their sizes, and `kept`: the files that were there before and stay.
        """
        return pushing.push(self, self._checkpoint({}), repository, **options)

    def _checkpoint(self, data: Mapping[str, Any]) -> formats.LoadedCheckpoint:
        """What the formats write: the arrays of the model as it is now."""
        checkpoint = loading.read_model(self.source, self.stated)
        if checkpoint.model_config.image_size != self.model_config.image_size:
            checkpoint = saved_objectives.with_found(checkpoint)
        weights = jax.device_get(registry.split(self.model)[1])
        for name, array in patterns.named(patterns.union(*weights)).items():
            tensors_by_name.check_finite(f"{self.source}: {name}", np.asarray(array))
        if stated := file_header.preprocessing_in(self.config.data):
            checkpoint = dataclasses.replace(checkpoint, preprocessing=stated)
        checkpoint = dataclasses.replace(
            checkpoint, model_config=self.model_config, params=weights.params, variables=weights.variables
        )  # fmt: skip
        if data:
            stated = formats.preprocessing_with(checkpoint, data, self.source)
            checkpoint = dataclasses.replace(checkpoint, preprocessing=stated)
        return checkpoint

    _best = functools.cached_property(predict.make_best)
    _data = functools.cached_property(data_of)

    @functools.cached_property
    def _segmenter(self) -> Callable[[str | None], Segmenter]:
        return functools.cache(functools.partial(Segmenter, self))

    @functools.cached_property
    def _feature_programs(self) -> dict:
        return {}

    def _feature_program(self, wanted: Wanted) -> tuple[TrainedModel, Compiled]:
        """The run at the size that is asked for, and its program, compiled once for each batch size."""
        if wanted not in self._feature_programs:
            run = at_size(self, wanted)
            self._feature_programs[wanted] = run, compile_features(run, wanted)
        return self._feature_programs[wanted]


def load_run(
    source: epath.PathLike,
    mesh: jax.sharding.Mesh | None = None,
    *,
    image_size: Size | str | None = None,
    model: Mapping[str, Any] | None = None,
    classes: Sequence[str] = (),
    **options: "Unpack[ComputeOptions]",
) -> Run:
    """A trained model and what is needed to use it, from a checkpoint of any format.

    >>> run = vit_jax.load_run("vit_base_patch16_224.augreg_in21k")
    >>> run("cat.jpg").names

    Args:
      source: a run's workdir, its checkpoints folder, one checkpoint; a file or folder of another format; hf://OWNER/NAME;
        or a name of timm. Local, or in a bucket.
      mesh: where the parameters go; by default whole on every device.
      image_size: of the images that the model is to take, where it should be another: positions are interpolated.
      model: options of the model of a checkpoint that is not of ours, where what is recognised is to be another, or
        its file does not say it.
      classes: names of the classes of such a checkpoint, in the order of its logits, where its file does not say them.
      **options: how the model is computed, where that should differ from the run: `dtype`, and options of the role
        'compute'.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged, or the hub cannot be reached.
      ConfigError: an option has an invalid value.
    """
    stated = dict(model or {}) | ({"classes": tuple(classes)} if classes else {})
    run = loading.load_run(source, mesh, model_options=stated or None, **options)
    if image_size is not None:
        run = loading.resized(run, image_size)
    return Run(**vars(run), source=os.fspath(source), stated=stated)


def _raise_if_bad(answer: Any) -> Any:
    if isinstance(answer, BadImage):
        raise answer
    return answer
