"""The names that a family has in the PyTorch code of its authors: what `torch.save` wrote, a
`.safetensors` file, or the same tensors in an `.npz` file.
"""

import json

from etils import epath

from vit_jax.interchange import named, pytorch
from vit_jax.interchange.formats import Foreign, Wishes
from vit_jax.interchange.opened import Opened

NAME = "authors"


def recognises(opened: Opened) -> bool:
    """Whether a family knows the names."""
    return opened.container not in ("folder", "") and named.is_found(
        opened, NAME, said=named.in_header(opened), prefixes=opened.prefixes
    )


def read(opened: Opened, wishes: Wishes) -> Foreign:
    """See `formats`."""
    stated = named.in_header(opened)
    found = named.find(opened, NAME, stated | named.said(wishes), opened.prefixes)
    return named.with_header(named.read(opened, found, NAME, wishes, stated), opened)


def write(foreign: Foreign, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file.

    Raises:
      CheckpointError: the authors' code has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    conversion = named.conversion_of(foreign.model_config, NAME, path)
    foreign = named.expressed(foreign, conversion, NAME)
    header = named.header(foreign, named.options_of_model(foreign.model_config))
    named.write_safetensors(foreign, conversion, path, {pytorch.METADATA: json.dumps(header)})
