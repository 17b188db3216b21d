"""Segmentation by the names of classes alone: each pixel has the class whose texts its patch is most like (dino.txt,
arXiv 2412.16334 §4). No mask is learned from.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.labels.masks import mask_table
from vit_jax.devices import meshes
from vit_jax.evaluation import contract, words
from vit_jax.evaluation.both_towers import TextProgram
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.evaluation.segmentation import Segmentation
from vit_jax.evaluation.templates import check_templates


class WordMaps(Segmentation):
    """`mean_iou`, `pixel_accuracy`, `mean_accuracy`, `images` and `iou/CLASS`, as `segmentation` has them."""

    Options = words.WordMapsOptions

    def __init__(self, options: words.WordMapsOptions, context: EvalContext):
        contract.Evaluator.__init__(self, options, context)
        self._texts = TextProgram(context.networks, context.config.objective.name)
        self.config = dataclasses.replace(context.config, data=self.data())
        self.source, where = (
            sources.open_eval(self.config.data),
            "config.eval.evaluators: word_maps",
        )
        table = mask_table(self.source)
        if table is None:
            raise ConfigError(
                f"{where} needs masks, and {self.config.data.name!r} has none: set its option data, such as "
                "('word_maps', {'data': {'name': 'masks', 'path': 'DIR'}})"
            )
        self.classes, self.things, self._compiled = tuple(table.classes), (), None
        named = self.classes[1:] if options.threshold > words.ANY else self.classes
        self._names = options.names or named
        if len(self._names) != len(named):
            raise ConfigError(
                f"{where}: names has {len(options.names)}, and the data {len(named)} classes to name"
            )
        check_templates(options.templates, where)
        words.warn_of_names(self._names, options.templates[0], self._texts.rows, self._texts.text)
        self._map = words.make_map_answers(context.networks, self.config.data, options.threshold)

    def answers_of(self, trained: EvaluatedModel, mesh: Mesh) -> Callable:
        if self._compiled is None:
            self._compiled = jax.jit(self._map, out_shardings=meshes.batch_sharding(mesh))
        names, templates = self._names, self.options.templates
        size = self.config.eval.batch_size or self.config.batch_size
        of_model = self.context.networks, names, templates, trained.module_weights
        return functools.partial(
            self._compiled, words.vectors_of_patches(self._texts, *of_model, mesh, size)
        )
