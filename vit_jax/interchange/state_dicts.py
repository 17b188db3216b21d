"""Which of the tensors that a training script saved are the model's weights, and what stands before
their names.

A script saves a dictionary of its state: weights, often twice (as trained and averaged), optimizer,
options. Weights are a dictionary of tensors by name, under one of the keys below or, where the user
says so, any other.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import skips
from vit_jax.interchange.conversions.skips import Skip, matching
from vit_jax.models.classifier import ClassifierConfig

# Averaged weights come first: those are what a script evaluates. A teacher is an average, too, and so is the target of
# I-JEPA and MSN.
KEYS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher", "target_encoder",
    "state_dict", "model_state_dict", "model", "module", "net", "network", "student",
)  # fmt: skip
# What scripts and wrappers put before all names of a model.
_BEFORE = (
    "ema", "model_ema", "ema_model", "teacher", "momentum_encoder", "module", "model", "backbone", "encoder",
    "net", "network", "student", "base_encoder", "visual", "trunk",
)  # fmt: skip
# Parts of names that compilers and wrappers of layers leave anywhere in them.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What CLIP has of its text tower, without a name before it.
_OF_TEXTS = (
    "token_embedding",
    "positional_embedding",
    "transformer",
    "ln_final",
    "text_projection",
)
_MOST_VISITS = 10_000  # dictionaries; one may be in several others
_DEPTH = 3  # how deep dictionaries of dictionaries are searched
# What wrappers and scripts keep among a model's tensors, within its prefix or beside it.
_OF_SCRIPTS = (
    Skip(
        r"n_averaged|num_averaged|num_updates|(global_)?step|epoch|iterations?|decay", "counts the script's steps",
        "the script's state",
    ),
    Skip(
        r"((\d+|normali[sz]\w*|(\w+_)?preprocess\w*|transforms?)\.)?((pixel|image|img|input)_)?(mean|std)",
        "normalises images before the network: set config.data.mean and std to it", "a normalisation of images",
    ),
    Skip(
        r"(\w+_)?(metrics?|acc\d*|accuracy|top\d+|f1|auroc|auc|precision|recall|m?iou|jaccard|dice|confmat|confusion)"
        r"(_\w+)?\..*|(.*\.)?(tp|fp|tn|fn|correct|total|confmat)",
        "counts right and wrong answers", "metrics",
    ),
    Skip(r"(aux|\w+_aux)\w*\..*", "reads the network for a loss beside", "an auxiliary head"),
)  # fmt: skip
# Of a model that has its own head, `head`.
_MORE_HEADS = (
    Skip(r"(?!(cls|main)_)\w+_head\w*\..*", "reads what the network gives", "a second head"),
)  # fmt: skip
# What pre-training needs beside the network that it trains; no part of a model. MAE's decoder is handed on, and its
# positions are compared there (`mae_conversion`).
EXTRAS = (
    Skip("mask_token", "stands for patches that pre-training hides, and no image has any"),
    Skip(r"decoder_(pos_embed|embed|blocks|norm|pred)(\..*)?", "predicts hidden patches", "MAE's decoder"),
    Skip(r"decoder\..*", "predicts hidden patches", "a decoder"),
    Skip(
        r"(dino_head|ibot_head|projection_head|projectors?|predictor|prototypes)\..*",
        "reads features for a loss without labels", "a head of pre-training",
    ),
    *_OF_SCRIPTS,
)  # fmt: skip
# The same beside the network that a prefix names.
BESIDE = (
    Skip(
        r"(mask_token|queue\w*|center|logit_scale|logit_bias)", "state of pre-training", "the script's state",
    ),
    *_OF_SCRIPTS,
    Skip(
        r"(\w*head\w*|fc|classifier|projectors?|projection|predictor|prototypes|neck)\..*",
        "reads what the network gives", "a head beside the network",
    ),
    Skip(r"decoder\w*\..*|decoder_\w+", "predicts hidden patches", "a decoder"),
    Skip(r"text\..*", "reads texts, not images", "the text tower"),
    Skip(r"(\w*loss\w*|criterion)\..*", "state of a loss", "a loss"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which tensors of a file are read: what the user says behind its name, after a '#'.

    Attributes:
      state_dict: the key under which they are, see `find_tensors`.
      prefix: what stands before all names of the model; others are skipped.
      ignore: a pattern of names to skip, with or without what stands before all names.
    """

    state_dict: str = ""
    prefix: str = ""
    ignore: str = ""

    def of(self, tensors: dict[str, LazyArray], path: epath.Path) -> dict[str, LazyArray]:
        """The tensors to read, by their names without the prefix.

        Raises:
          ConfigError: no name begins with the prefix, or matches the pattern, or it is no pattern.
        """
        if self.prefix:
            before = f"{self.prefix.removesuffix('.')}."
            chosen = {n.removeprefix(before): t for n, t in tensors.items() if n.startswith(before)}
            if not chosen:
                raise ConfigError(
                    f"{path}#prefix={self.prefix}: no tensor's name begins with {before!r}; there are "
                    f"{listed(sorted(tensors), 6)}"
                )
            _log_skipped(path, tensors, [f"{before}{name}" for name in chosen])
            tensors = chosen
        if self.ignore:
            pattern = _pattern(self.ignore, path)
            chosen = {n: t for n, t in tensors.items() if not pattern.fullmatch(n)}
            if len(chosen) == len(tensors):
                raise ConfigError(
                    f"{path}#ignore={self.ignore}: no tensor is called so; a pattern must match a whole name, and "
                    f"there are {listed(sorted(tensors), 6)}"
                )
            _log_skipped(path, tensors, chosen)
            tensors = chosen
        return tensors


def _pattern(text: str, path: epath.Path) -> re.Pattern:
    try:
        return re.compile(rf"(.*\.)?(?:{text})")
    except re.error as error:
        raise ConfigError(f"{path}#ignore={text} is not a regular expression: {error}") from error


def _log_skipped(path: epath.Path, tensors: Iterable[str], chosen: Iterable[str]) -> None:
    """Logs which tensors are skipped as the user says."""
    kept = set(chosen)
    skipped = [name for name in tensors if name not in kept]
    if skipped:
        logging.info("%s: skipped, as its name says: %s", path, listed(skipped))


def find_tensors(content: Any, path: epath.Path, wanted: str = "") -> dict[str, LazyArray]:
    """The tensors by name of what a script saved, of the averaged model if it has both.

    Args:
      content: see `pickles.read`.
      path: for messages.
      wanted: the key under which they are, with dots between keys of keys; '': see `KEYS`.

    Raises:
      CheckpointError: it holds no dictionary of tensors under a known key.
      ConfigError: there is none under `wanted`.
    """
    every = dict(_dictionaries(content, "", itertools.count()))
    if wanted:
        if wanted not in every:
            raise ConfigError(
                f"{path}#state_dict={wanted}: there are no tensors under that name{_listed(every)}"
            )
        chosen = wanted
    else:
        known = [name for name in every if all(key in KEYS for key in name.split(".") if key)]
        if not known:
            kinds = sorted(content) if isinstance(content, dict) else [type(content).__name__]
            raise CheckpointError(
                f"{path} holds no state dict, a dictionary of tensors by name, under {', '.join(KEYS)}"
                f"{_listed(every) or '; it has ' + ', '.join(map(str, kinds[:8]))}"
            )
        # A number or a table may stand beside the weights: the dictionary itself comes last.
        chosen = min(
            known, key=lambda name: [KEYS.index(k) if k else len(KEYS) for k in name.split(".")]
        )
        others = [name for name in known if name not in (chosen, "")]
        if others:
            logging.info(
                "%s holds the weights %s: %s are read; to read others, say %s#state_dict=%s",
                path, " and ".join([chosen, *others]), chosen, path, others[0],
            )  # fmt: skip
    skipped = [str(key) for key in content if key != chosen.split(".")[0]] if chosen else []
    if skipped:
        logging.info("%s: skipped, beside %s: %s", path, chosen, ", ".join(skipped))
    return _tensors(every[chosen], path)


def _dictionaries(
    content: Any, name: str, visits: Iterator[int], depth: int = 0
) -> Iterable[tuple[str, dict]]:
    """Every dictionary of tensors in what was saved, by its key."""
    if not isinstance(content, dict):
        return
    if next(visits) > _MOST_VISITS:
        raise CheckpointError(f"it holds more than {_MOST_VISITS:,} dictionaries")
    if any(isinstance(value, LazyArray) for value in content.values()):
        yield name, content
    if depth < _DEPTH:
        for key, value in content.items():
            inside = f"{name}.{key}" if name else str(key)
            yield from _dictionaries(value, inside, visits, depth + 1)


def _tensors(content: Mapping[Any, Any], path: epath.Path) -> dict[str, LazyArray]:
    """The tensors of a state dict, without what compilers put into their names."""
    others = [str(name) for name, value in content.items() if not isinstance(value, LazyArray)]
    if others:
        logging.info("%s: skipped, no tensors: %s", path, ", ".join(others))
    return without_wrappers({n: t for n, t in content.items() if isinstance(t, LazyArray)})


def without_wrappers(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """The tensors by their names without the parts that compilers and wrappers of layers put in."""
    cut = {".".join(k for k in name.split(".") if k not in _WRAPPERS): name for name in tensors}
    return {short: tensors[name] for short, name in cut.items()}


def prefixes(names: Iterable[str]) -> list[str]:
    """What may stand before all names of a model, in the order in which to look: nothing, else what
    begins with an average's name, else what most names begin with; and then any other beginning of more
    than half of the names, the shortest first.
    """
    names = list(names)
    counts: dict[str, int] = {}
    for name in names:
        before = ""
        for part in name.split(".")[:-1]:
            if part not in _BEFORE:
                break
            before += f"{part}."
            counts[before] = counts.get(before, 0) + 1

    def order(prefix: str) -> tuple[int, int]:
        return min(_BEFORE.index(part) for part in prefix.split(".")[:-1]) // 5, -counts[prefix]

    known = ["", *sorted(counts, key=order)]
    return [*known, *(before for before in _common(names) if before not in known)]


def _common(names: Sequence[str]) -> list[str]:
    """The beginnings, up to a dot, of more than half of the names."""
    counts: dict[str, int] = {}
    for name in names:
        for dot in (match.end() for match in re.finditer(r"\.", name)):
            counts[name[:dot]] = counts.get(name[:dot], 0) + 1
    return sorted((before for before, n in counts.items() if 2 * n > len(names)), key=len)


def left_out(
    own: Sequence[Skip | str],
    tensors: Mapping[str, LazyArray],
    known: Collection[str],
    config: ClassifierConfig,
    path: epath.Path,
) -> dict[str, Skip]:
    """The tensors of a file that are no part of its model, each with the reason, which are logged.

    Args:
      own: what its format leaves out beside `EXTRAS`.
      known: names of tensors that have a place in the model.

    Raises:
      CheckpointError: one has other values than the model computes in its place.
    """
    skipped = matching(own, tensors)
    has_place = {*known, *skipped}
    extras = [*EXTRAS, *(_MORE_HEADS if config.num_classes else ())]
    skipped |= matching(extras, [name for name in tensors if name not in has_place])
    if skipped:
        logging.info("%s: skipped, not part of the model: %s", path, skips.text(skipped))
    skips.check_computed(skipped, tensors, config, path)
    return skipped


def refuse_lost_positions(
    own: Sequence[Skip | str],
    names: Iterable[str],
    prefix: str,
    config: ClassifierConfig,
    path: epath.Path,
) -> None:
    """Raises `CheckpointError` for a model without positions whose file has a tensor that is about some.

    Args:
      own: what its format leaves out; other networks' positions do not count, there and beside the model.
      names: of all tensors of the file.
      prefix: of the model's.
    """
    if config.knows_positions:
        return
    spoken = [n.removeprefix(prefix) for n in names if skips.is_about_positions(n)]
    every = [skip for skip in (*own, *EXTRAS, *BESIDE) if isinstance(skip, Skip)]
    others = matching([skip for skip in every if skip.network], spoken)
    lost = [name for name in spoken if name not in others]
    if lost:
        raise CheckpointError(
            f"{path} would be read as a model without positions, and it has {listed(lost, 3)}: its network is none "
            "of those that are read here, or its options say something else of it"
        )


def check_beside(names: Iterable[str], prefix: str, path: epath.Path) -> None:
    """Says which tensors are beside the model `prefix`.

    Raises:
      CheckpointError: some are neither another network's nor of a kind that pre-training needs.
    """
    names = list(names)
    skipped, unknown = [], []
    of_texts = _OF_TEXTS if "token_embedding.weight" in names else ()
    for name in names:
        if name.startswith(prefix):
            continue
        parts = name.split(".")
        own = next((i for i, part in enumerate(parts) if part not in _BEFORE), len(parts) - 1)
        own = max(own, _parts_in_common(parts[:-1], prefix.split(".")))
        rest = ".".join(parts[own:])
        network = own and not prefix.startswith(".".join(parts[:own]) + ".")
        if network or matching(BESIDE, [rest]) or parts[0] in of_texts:
            skipped.append(name)
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{path}: the model's tensors begin with {prefix!r}, and these, of no known kind, do not: "
            f"{listed(unknown)}. To read the model without them, say {path}#prefix={prefix.removesuffix('.')}"
        )
    if skipped:
        logging.info("%s: skipped, beside the model %s: %s", path, prefix, listed(skipped))


def _parts_in_common(name: Sequence[str], other: Sequence[str]) -> int:
    """How many parts two names, split at their dots, have in common at the beginning."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))
    return sum(1 for _ in equal)


def listed(names: list[str], most: int = 12) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _listed(every: Mapping[str, dict]) -> str:
    named = [f"{name} ({len(tensors)})" for name, tensors in every.items() if name]
    if not named:
        return ""
    first = next(name for name in every if name)
    return f"; tensors are under {', '.join(named)}: choose one with #state_dict={first}"
