"""A weighted sum of objectives over one model: images and texts beside the features of other models, or masked patches.

A term is any objective that learns from one view of an image, a guest's too. It brings its parameters, its fixed
teachers or one moving average, and what it needs of a batch (`targets`). Terms that are an `OutputTerm` share one
forward pass; each other one sees the images its own way, and has a forward pass of its own. If a term learns from
labels the model has a head and is judged by it.

A term that has not begun costs nothing but that shared pass, unless it has state (running moments): that moves from the
first step on.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import (
    Batch,
    FromCheckpoint,
    Learner,
    MovingAverage,
    Objective,
    ObjectiveContext,
    SavedObjective,
)
from vit_jax.objectives.image_text.image_text import ImageText, TokenOptions
from vit_jax.objectives.output_term import OutputTerm, forward
from vit_jax.objectives.supervised import Supervised

_OPTION = "config.objective.terms"


@dataclasses.dataclass(frozen=True)
class SumOptions(TokenOptions):
    """What `config.objective` says for a sum; of its term image_text also what its tokens are."""

    tokenizer: str = option("", "as of image_text, if that is a term; '': it is none")
    terms: tuple = option(
        (),
        "(name, options) of objectives; besides their own options weight (1) and start, a duration before which a term "
        "does not count: (('image_text', {}), ('features', {'teachers': ('RUN',), 'weight': 0.5, 'start': '80%'}))",
    )

    @property
    def loss(self) -> str:
        """The cross-entropy of the term with labels, by which logits become probabilities."""
        given = dict(_named(self.terms))
        known = (name for name in given if name in objectives.OBJECTIVES)
        labelled = (name for name in known if _kind(name).needs_labels)
        return given.get(next(labelled, ""), {}).get("loss", "softmax")


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of the sum.

    Attributes:
      name: its objective's.
      objective: what is learned.
      weight: of its loss.
      start: the step at which it begins.
      teachers: which of the sum's fixed teachers are its own.
    """

    name: str
    objective: Objective
    weight: float
    start: int
    teachers: slice


class SupervisedOutput(Supervised, OutputTerm):
    """Classification, of the forward pass that it shares. `Supervised` is no `OutputTerm`, so that runs without a sum
    do not load what reads layers.
    """


class Own(nnx.Module):
    """What each term owns, by its name."""

    def __init__(self, terms: Mapping[str, nnx.Module]):
        self.terms = nnx.Dict(dict(terms))


class Sum(Objective):
    """The loss. Metrics: of each term its `loss`, and its own, after its name: `features_loss`; before it begins 0."""

    Options = SumOptions
    needs_labels = False
    mixes = False

    @classmethod
    def variant(cls, options: SumOptions) -> type["Sum"]:
        kinds = [_kind(name) for name, _ in _named(options.terms) if name in objectives.OBJECTIVES]
        if any(issubclass(kind, ImageText) for kind in kinds):
            return TextSum
        if not any(kind.needs_labels for kind in kinds):
            return cls
        return MixedSum if all(kind.mixes for kind in kinds) else LabelledSum

    def __init__(self, options: SumOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if not options.terms:
            raise ConfigError(
                f"objective sum needs terms: set --{_OPTION}=\"(('image_text',{{}}),('masked_patches',{{}}))\""
            )
        terms, teachers = [], 0
        for name, given in _named(options.terms):
            terms.append(self._term(name, given, teachers))
            teachers = terms[-1].teachers.stop
        self.terms, names = tuple(terms), [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ConfigError(f"{_OPTION}: {', '.join(names)}: each objective can be a term once")
        if bool(options.tokenizer) != ("image_text" in names):
            wrong = "the term image_text needs a tokenizer: set it to bytes, or a file"
            wrong = "no term learns from texts: leave it out" if options.tokenizer else wrong
            raise ConfigError(f"config.objective.tokenizer = {options.tokenizer!r}: {wrong}")
        averages = [t for t in terms if isinstance(t.objective.teacher(), MovingAverage)]
        if len(averages) > 1 or (averages and teachers):
            raise ConfigError(
                f"{_OPTION}: {averages[0].name} has a moving average as its teacher, beside which no other term can "
                "have a teacher"
            )
        self._average = averages[0] if averages else None
        self.shared = tuple(t for t in self.terms if isinstance(t.objective, OutputTerm))
        if len({t.objective.fixed_model for t in self.shared}) > 1:
            raise ConfigError(
                f"{_OPTION}: config.objective.image_blocks of image_text computes the image tower as in evaluation, "
                "which no other term does: set it to 0"
            )
        layers = (name for term in self.shared for name in term.objective.layers)
        self.layers = tuple(dict.fromkeys(layers))

    def _term(self, name: str, given: dict[str, Any], first: int) -> Term:
        """A term, as the options say; `first` is the number of its first fixed teacher."""
        if name not in objectives.OBJECTIVES:
            hint = nearest(name, objectives.OBJECTIVES)
            raise ConfigError(f"{_OPTION}: {name!r} is no objective{hint}")
        kind = _kind(name)
        if kind.needs_views or kind.needs_masks or issubclass(kind, Sum):
            raise ConfigError(
                f"{_OPTION}: {name} learns from masks or several views of an image, which a sum does not have"
            )
        if kind.needs_labels and isinstance(self, TextSum):
            raise ConfigError(
                f"{_OPTION}: {name} learns from labels, and image_text from captions, which no data has together"
            )
        weight, start = given.pop("weight", 1.0), given.pop("start", "0 steps")
        if not isinstance(weight, (int, float)) or not weight >= 0:
            raise ConfigError(
                f"{_OPTION}: {name}: weight = {weight!r} must be a number of at least 0"
            )
        try:
            start = self.context.to_steps(start)
        except ConfigError as error:
            raise ConfigError(f"{_OPTION}: {name}: start = {start!r}: {error}") from error
        own = schema.checked_options(kind.Options, given, f"{_OPTION}: {name}", "config.objective.")
        options = kind.Options(**own)
        if issubclass(kind.Options, TokenOptions):
            tokens = {f.name: getattr(self.options, f.name) for f in schema.options(TokenOptions)}
            if twice := [field for field in tokens if field in given]:
                raise ConfigError(
                    f"{_OPTION}: {name}: {twice[0]} is an option of the sum: set config.objective.{twice[0]}"
                )
            options = dataclasses.replace(options, **tokens)
        without = dataclasses.replace(self.context, teachers=())
        objective = kind(options, without)
        source = objective.teacher()
        count = len(source) if isinstance(source, tuple) else isinstance(source, FromCheckpoint)
        teachers = slice(first, first + count)
        if given_teachers := self.context.teachers[teachers]:
            objective = kind(options, dataclasses.replace(without, teachers=given_teachers))
        return Term(name, objective, float(weight), start, teachers)

    def own_modules(self, rngs: nnx.Rngs) -> Own:
        made = {term.name: term.objective.own_modules(rngs) for term in self.terms}
        return Own({name: own for name, own in made.items() if own is not None})

    def own_from(
        self, saved: SavedObjective, like: Weights
    ) -> tuple[dict[str, Any], dict[str, str]]:
        if issubclass(saved.kind, Sum):
            saved = dataclasses.replace(saved, kind=Sum)  # of other terms
        return super().own_from(saved, like)

    def teacher(self) -> tuple[FromCheckpoint, ...] | MovingAverage | None:
        if self._average:
            return self._average.objective.teacher()
        sources = [term.objective.teacher() for term in self.terms]
        flat = [
            s for source in sources for s in (source if isinstance(source, tuple) else (source,))
        ]
        return tuple(source for source in flat if source is not None) or None

    def targets(self, batch: Batch) -> Batch:
        merged = {}
        for term in self.terms:
            merged |= term.objective.targets(batch)
        return merged

    def flops(self) -> int:
        """Operations of an image's forward passes; the shared one counts once."""
        of_model = registry.count_flops(self.context.model)
        total = sum(term.objective.flops() for term in self.terms)
        return total - max(len(self.shared) - 1, 0) * of_model

    def warning(self, metrics: dict[str, float]) -> str:
        own = (
            term.objective.warning(
                {n.removeprefix(f"{term.name}_"): value for n, value in metrics.items()}
            )
            for term in self.terms
        )
        return " ".join(text for text in own if text)

    def text_term(self, own: Own | None) -> tuple[ImageText, nnx.Module | None] | None:
        """The term that compares images with texts, and what it owns; `None` if there is none."""
        for term in self.terms:
            if isinstance(term.objective, ImageText):
                return term.objective, own and own.terms[term.name]
        return None

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        seen = None
        if self.shared:
            fixed = self.shared[0].objective.fixed_model
            seen = forward(learner.model, batch["image"], self.layers, fixed=fixed, rngs=rngs)
        loss, metrics = 0.0, {}
        for term in self.terms:
            of_term, own_metrics = self._loss(term, learner, seen, batch, rngs.dropout())
            weight = jnp.where(learner.step >= term.start, term.weight, 0.0)
            loss += weight * of_term
            own_metrics = {"loss": of_term} | own_metrics
            metrics |= {f"{term.name}_{name}": value for name, value in own_metrics.items()}
        return loss, metrics

    def _loss(
        self, term: Term, learner: Learner, seen: tuple | None, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss and metrics of a term; zeros before it begins."""
        own = learner.own.terms.get(term.name)
        teacher = self._teacher_of(term, learner)
        of_term = dataclasses.replace(learner, own=own, teacher=teacher)

        def run() -> tuple[jax.Array, dict[str, jax.Array]]:
            rngs, objective = nnx.Rngs(dropout=key), term.objective
            if not isinstance(objective, OutputTerm):
                return objective(of_term, batch, rngs)
            output, layers = seen
            read = tuple(layers[self.layers.index(name)] for name in objective.layers)
            return objective.of_output(of_term, output, read, batch, rngs)

        return run() if not term.start or _has_state(own) else _if(learner.step >= term.start, run)

    def _teacher_of(self, term: Term, learner: Learner) -> Any:
        """A term's part of the sum's teachers, as it would have them alone."""
        if term is self._average:
            average = learner.teacher
            return dataclasses.replace(average, own=average.own.terms.get(term.name))
        source = term.objective.teacher()
        if source is None:
            return None
        own = learner.teacher[term.teachers]
        return own if isinstance(source, tuple) else own[0]


class TextSum(Sum):
    """Some term compares images with texts."""

    own_judged = True
    evaluator = ImageText.evaluator


class LabelledSum(Sum):
    """Some term learns from labels."""

    needs_labels = True


class MixedSum(LabelledSum):
    """All terms learn from mixed images too."""

    mixes = True


def _named(terms: tuple) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of terms; some are a name alone."""
    pairs = ((entry, {}) if isinstance(entry, str) else entry for entry in terms)
    return [(name, dict(given)) for name, given in pairs]


def _kind(name: str) -> type[Objective]:
    """The objective of a term."""
    kind = objectives.OBJECTIVES[name]
    return SupervisedOutput if kind is Supervised else kind


def _has_state(own: nnx.Module | None) -> bool:
    """Whether something of it is neither trained nor constant."""
    return own is not None and bool(registry.split(own)[1].variables)


def _if(condition: jax.Array, run: Callable) -> Any:
    """What `run` gives, or zeros without running it."""
    shapes = jax.eval_shape(run)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return jax.lax.cond(condition, run, zeros)
