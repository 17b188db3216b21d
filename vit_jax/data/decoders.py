"""Which decoder cuts images out of files: said when a run starts, and the same in all its processes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import logging

from vit_jax.base.errors import ConfigError
from vit_jax.data import decode
from vit_jax.devices import processes

if TYPE_CHECKING:
    from vit_jax.config import Config

COMPILED, PYTHON = "native", "OpenCV"

# Training crops of 224 pixels from 100 ImageNet photos on one core: 1.1 ms against 2.6.
_COST = (
    "images are decoded by OpenCV and Pillow, at about 40 %% of the speed of the compiled decoder, which "
    "cannot be used (%s): install a C compiler (apt-get install gcc libc6-dev), and then vit_jax again"
)


def name() -> str:
    """'native', the compiled one, or 'OpenCV', with Pillow, which stands in for it."""
    return COMPILED if decode.is_native() else PYTHON


def agree(config: "Config") -> str:
    """Says which decoder this run has, and gives its name; of several, with commas between.

    Call it in all processes, before devices are used.

    Args:
      config: the run's; `data.mixed_decoders` and `hosts.wait_minutes` are used.

    Raises:
      ConfigError: processes have different ones, and the config does not allow that; the same error
        in all of them.
    """
    if decode.is_native():
        logging.info("images are decoded by the compiled decoder")
    else:
        logging.warning(_COST, decode.why_not_native())
    names = processes.gather("decoder", name(), config.hosts.wait_minutes)
    return common(names, config.data.mixed_decoders)


def common(names: Sequence[str], may_differ: bool) -> str:
    """The decoder of all processes, from the `names` in their order; see `agree`."""
    found = sorted(set(names))
    if len(found) > 1 and not may_differ:
        who = "; ".join(f"{n}: {_numbers(i for i, m in enumerate(names) if m == n)}" for n in found)
        raise ConfigError(
            f"processes decode images differently ({who}), so that crops would depend on the host by rounding: "
            "install vit_jax alike on all hosts, with a C compiler, or allow it with "
            "--config.data.mixed_decoders=True"
        )
    return ", ".join(found)


def _numbers(indices) -> str:
    listed = list(map(str, indices))
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"process {', '.join(listed[:8])}{more}"
