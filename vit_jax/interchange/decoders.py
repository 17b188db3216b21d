"""The decoder of a masked autoencoder, which files of MAE hold beside the encoder: that of its authors, and
transformers' ViTMAEForPreTraining. It belongs to the objective, not to the model.
"""

import dataclasses

import jax
import numpy as np
from absl import logging

from vit_jax.interchange import adapt, formats
from vit_jax.interchange.formats import Foreign
from vit_jax.models import vit
from vit_jax.models.classifier import Options
from vit_jax.models.conversions import pytorch, rules, vit_timm, vit_towers
from vit_jax.models.conversions.rules import Lazy, Rule
from vit_jax.models.embeddings import sincos_2d
from vit_jax.objectives.contract import Objective
from vit_jax.objectives.mae import Mae

# By format: what its names of blocks and of the norm after them become, and what stands before all others.
_NAMES = {
    "timm": (("blocks.", "decoder_blocks."), ("norm.", "decoder_norm."), ""),
    "huggingface": (
        ("encoder.layer.", "decoder.decoder_layers."), ("layernorm.", "decoder.decoder_norm."), "decoder.",
    ),
}  # fmt: skip


def rules_of(decoder: vit.Config, format: str) -> list[Rule]:
    """Which tensors of a format are which parameters of `objectives.mae.Own`."""
    if format == "huggingface":
        table = vit_towers.rules(decoder, {"kind": "vit_mae", "prefix": ""})
    else:
        conversion = vit_timm.Timm()
        table = conversion.rules(decoder, conversion.layout(decoder))
    *starts, before = _NAMES[format]

    def theirs(name: str) -> str:
        old, new = next(pair for pair in starts if name.startswith(pair[0]))
        return new + name.removeprefix(old)

    return [
        *(
            dataclasses.replace(
                rule,
                ours=f"decoder/{rule.ours.removeprefix('encoder/')}",
                theirs=tuple(map(theirs, rule.names)),
            )
            for rule in table
            if rule.ours.startswith("encoder/")
        ),
        *pytorch.linear("embed", f"{before}decoder_embed"),
        Rule("mask", f"{before}mask_token", rules.expanded(0, 1)),
        *pytorch.linear("head", f"{before}decoder_pred"),
    ]


def own_of(objective: Objective, location: str, model: Options, own: dict) -> dict:
    """The parameters that an objective owns, those of a checkpoint where it has such: MAE's decoder.

    Args:
      objective: of the run.
      location: of the checkpoint, in any format.
      model: of the run.
      own: the new ones.
    """
    if not isinstance(objective, Mae):
        return own
    found = load(formats.read(location, hints=vars(model)), objective.decoder, own)
    return own if found is None else found


def load(foreign: Foreign, decoder: vit.Config, like: dict) -> dict | None:
    """The parameters of a decoder from what a file has beside the encoder; `None` if it has none, or another, of
    which a sentence is logged.

    Args:
      foreign: the file.
      decoder: its blocks.
      like: shapes, dtypes and shardings of `objectives.mae.Own`'s parameters.
    """
    format = foreign.layout.get("format")
    if format not in _NAMES or not any("decoder_pred" in name for name in foreign.extras):
        return None
    # Transformers 5 saves blocks under another name than the released one.
    extras = {
        name.replace(".decoder_encoder.layer.", ".decoder_layers."): tensor
        for name, tensor in foreign.extras.items()
    }
    table, before = rules_of(decoder, format), _NAMES[format][-1]
    wanted = rules.specs(table, like)
    table_name = f"{before}decoder_pos_embed"
    found = {
        name: tuple(tensor.shape)
        for name, tensor in extras.items()
        if name != table_name and (name.startswith("decoder") or name == "mask_token")
    }
    why = ""
    if found != {name: shape for name, (shape, _) in wanted.items()}:
        why = "it is of another size"
    elif table_name in extras and not _is_sincos(extras[table_name], decoder):
        why = "its positions are not those of a decoder for such images"
    if why:
        logging.info("the decoder in the checkpoint is not taken, %s: it starts anew", why)
        return None
    tensors = {name: extras[name] for name in wanted}
    arrays = rules.to_ours(table, tensors, like, source="the decoder")
    logging.info("the decoder is the checkpoint's")
    return jax.tree.map(adapt.placed, arrays, like)


def _is_sincos(table: Lazy, decoder: vit.Config) -> bool:
    expected = sincos_2d(decoder.grid, decoder.width, periods=decoder.width // 4)
    if table.shape[1:] != (expected.shape[1] + 1, decoder.width):
        return False
    return np.allclose(np.asarray(table)[:, 1:], expected, atol=1e-5)
