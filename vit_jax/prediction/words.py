"""Maps of images by words: which of them each pixel is most like, by a model that was trained with images and texts."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.labels.masks import IGNORED
from vit_jax.devices import meshes
from vit_jax.evaluation import maps
from vit_jax.evaluation import words as by_words
from vit_jax.evaluation.both_towers import TextProgram
from vit_jax.evaluation.forward import data_of
from vit_jax.evaluation.run import with_objective_modules
from vit_jax.objectives import find_objective
from vit_jax.prediction.maps import Segmenter

_FIELD, _NONE = "--words", "none of these"


class WordSegmenter(Segmenter):
    """A model of images and texts, whose classes are words."""

    def __init__(
        self,
        run: TrainedModel,
        words: Sequence[str],
        windows: str | None = None,
        threshold: float | None = None,
    ):
        """
        Args:
          run: from `loading.load_run`.
          words: names of classes, which the texts are made of that the run is evaluated with, or else CLIP's seven.
          windows: one of `maps.WINDOWS`; by default as the run is evaluated.
          threshold: the cosine below which a pixel has none of the words, a class before them; -1: there is no such
            class; by default as the run is evaluated.

        Raises:
          ConfigError: the model has no text tower, its patches are not compared with texts, or it is not known how
            images are normalised; or the words are no names.
        """
        check_words(words, threshold)
        objective = run.config.objective.name
        if not find_objective(run.config.objective)[0].evaluates_with_modules:
            raise ConfigError(
                f"{_FIELD}: {run.directory} has no text tower, being trained with config.objective.name={objective!r}: "
                "pass a run of image_text"
            )
        run = with_objective_modules(run)
        options = maps.options_of(run.config.eval.evaluators, "word_maps", by_words.WordMapsOptions)
        networks = run.objective_modules.networks
        self.things, self.table = (), None
        self._windows, self._grain = windows or options.windows, maps.grain(run.model_config)
        maps.check_windows(self._windows, ())
        self.run = run
        self.data = data_of(run)
        self.classes = tuple(words)
        threshold = options.threshold if threshold is None else threshold
        self._options = dataclasses.replace(options, threshold=threshold)
        self.black = threshold > by_words.ANY
        if self.black:
            self.classes = (_NONE, *self.classes)
        mesh = meshes.replica_mesh()
        program = TextProgram(networks, objective)
        answers = by_words.make_map_answers(networks, self.data, threshold)
        of_classes = by_words.vectors_of_patches(
            program,
            networks,
            words,
            options.templates,
            run.objective_modules.weights,
            mesh,
            8 * mesh.size,
        )
        self.answers = functools.partial(jax.jit(answers), of_classes)


def check_words(words: Sequence[str], threshold: float | None = None) -> None:
    """Raises `ConfigError` for words that no map can be made of; with a `threshold` of one word there can be one."""
    named = [by_words.prompt(word, "{}") for word in words]
    has_none = threshold is not None and threshold > by_words.ANY
    if len(words) < 2 - has_none or not all(named):
        raise ConfigError(
            f"{_FIELD} = {','.join(words)!r}: name two words or more, separated by commas, and what else is in images: "
            f"{_FIELD}=tumour,stroma,background; or set --word_threshold, below which pixels have none of the words"
        )
    if twice := [word for i, word in enumerate(named) if word in named[:i]]:
        raise ConfigError(f"{_FIELD}: {twice[0]!r} is there twice")
    if len(words) >= IGNORED:
        raise ConfigError(f"{_FIELD}: {len(words)} words, and masks have {IGNORED - 1} at most")
