"""Writes vit_jax/models/published.json: what timm says of the published models of the
families that are here, and no weight file tells.

    python -m tests.interchange.published_names

timm is needed for this alone (`pip install --no-deps timm`).
"""

import collections
import functools
import importlib
import json
import pathlib
import re

from tests import without_torchvision
from vit_jax.models import published

# Of timm's classes, the models that are of a family here.
CLASSES = {
    "VisionTransformer": r".*",
    "VisionTransformerDistilled": r".*",
    "Eva": r".*",
    "Beit": r".*",
    "Cait": r".*",
    "NaFlexVit": r"naflexvit_\w+_(gap|map|siglip|radio_v\d)",
    "CrossVit": r".*",
    "MlpMixer": r"mixer_.*",
    "ResNetV2": r".*_bit",
    "EfficientNet": r"tf_efficientnet_(b\d|l2)",
}
MODULES = (
    "vision_transformer",
    "deit",
    "vision_transformer_hybrid",
    "eva",
    "beit",
    "cait",
    "naflexvit",
    "crossvit",
    "mlp_mixer",
    "resnetv2",
    "efficientnet",
)
# How layers are made and files are found, which is no fact about the model.
LEFT_OUT = {"pretrained_filter_fn", "pretrained_strict", "feature_cfg", "dynamic_img_size"}
LEFT_OUT |= {"embed_layer", "rope_rescale_coords", "weight_init"}
PREPROCESSING = ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")


class _Caught(Exception):
    """What a model would be built of is known."""


def models() -> dict[str, tuple[str, dict, dict | None]]:
    """The published names of these families: timm's class, its arguments, `pretrained_cfg`. Architectures
    without weights are there without the latter: others train them.
    """
    without_torchvision.timm_models()
    from timm.models import _registry

    caught, undo = {}, []

    def catch(cls, variant, pretrained, **arguments):
        caught.update(cls=getattr(cls, "__name__", str(cls)), arguments=arguments)
        raise _Caught

    for name in MODULES:
        module = importlib.import_module(f"timm.models.{name}")
        undo.append((module, module.build_model_with_cfg))
        module.build_model_with_cfg = catch
    found = {}
    published = _registry.list_pretrained()
    without = set(_registry.list_models()) - {name.partition(".")[0] for name in published}
    for name in [*published, *sorted(without)]:
        architecture = name.partition(".")[0]
        if _registry._model_to_module[architecture] not in MODULES:
            continue
        try:
            _registry.model_entrypoint(architecture)(pretrained=False)
        except _Caught:
            if re.fullmatch(CLASSES.get(caught["cls"], ""), architecture):
                config = _registry.get_pretrained_cfg(name).to_dict() if name in published else None
                found[name] = caught["cls"], dict(caught["arguments"]), config
    for module, build in undo:
        module.build_model_with_cfg = build
    return found


def facts(arguments: dict) -> dict:
    """Arguments of a class of timm as JSON: layers by their names, the epsilon of norms."""
    result = {}
    if cfg := arguments.pop("cfg", None):  # NaFlexVit's
        usual = vars(type(cfg)())
        arguments |= {name: value for name, value in vars(cfg).items() if value != usual[name]}
    for name, value in arguments.items():
        if name in LEFT_OUT:
            if name == "embed_layer":
                result[name] = _embedding(repr(value))
            continue
        if name == "norm_layer" and "eps" in getattr(value, "keywords", ()):
            result["norm_eps"] = value.keywords["eps"]
        if isinstance(value, functools.partial):
            value = value.func
        value = value.lower() if isinstance(value, str) else getattr(value, "__name__", value)
        # Of one number for each block, where all are the same.
        if isinstance(value, tuple) and len(value) > 3 and len(set(value)) == 1:
            value = value[0]
        result[name] = "silu" if value == "SiLU" else value
    return result


def _embedding(text: str) -> str:
    """What makes patches: MobileCLIP's convolutions, a ResNet with batch norms, or one with group norms."""
    if "ConvStem" in text:
        return "ConvStem"
    return "ResNet" if "GroupNorm" in text else "ResNetD"


def table(models: dict[str, tuple[str, dict, dict]]) -> dict:
    """`published.json`, of what `models` gives."""
    architectures, preprocessing, names = {}, [], collections.defaultdict(dict)
    for name, (cls, arguments, config) in models.items():
        architecture, _, tag = name.partition(".")
        if cls in (
            "VisionTransformer",
            "VisionTransformerDistilled",
            "Eva",
            "Beit",
            "NaFlexVit",
            "CrossVit",
        ):
            architectures[architecture] = [cls, facts(arguments)]
        else:
            architectures[architecture] = [cls, {}]
        if config is None:
            continue
        said = [config[field] for field in PREPROCESSING]
        if said not in preprocessing:
            preprocessing.append(said)
        names[architecture][tag] = preprocessing.index(said)
    return {"architectures": architectures, "preprocessing": preprocessing, "names": names}


def write(path: pathlib.Path = published.FILE) -> None:
    """A line for each architecture, so that changes can be read."""
    parts = []
    for key, value in json.loads(json.dumps(table(models()))).items():
        rows = value.items() if isinstance(value, dict) else ((None, row) for row in value)
        lines = ",\n".join(
            (f"{json.dumps(name)}: " if name else "") + json.dumps(row) for name, row in rows
        )
        brackets = "{}" if isinstance(value, dict) else "[]"
        parts.append(f'"{key}": {brackets[0]}\n{lines}\n{brackets[1]}')
    path.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    write()
