"""What each shipped recipe compiles to on a TPU slice, kept as JSON to be reviewed in `tests/golden/`.

    python -m tests.planning.golden [NAME …]     rewrites them on purpose; all of them: 15 minutes

`test_golden.py` compares. A change there is a change of what a pod will do: of memory, of traffic.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import sys

import jax

from vit_jax.base import patterns
from vit_jax.devices import meshes
from vit_jax.planning import compiling, plan, target
from vit_jax.planning.collectives import find, summary
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import Assembly

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe on a slice.

    Attributes:
      config: file of `configs/` and argument.
      topology, slices: where.
      changes: fields of the config that are not the recipe's.
      examples, num_classes: of the data, where no catalog tells.
    """

    config: str
    topology: str
    slices: int = 1
    changes: tuple = ()
    examples: int | None = None
    num_classes: int | None = None


_FROM_CHECKPOINT = (("init_from", ""), ("model.name", "ViT-B/16"), ("model.num_classes", 1000))
_INPUTS = (
    ("data.mean", (0.5, 0.5, 0.5)),
    ("data.std", (0.5, 0.5, 0.5)),
    ("data.interpolation", "bilinear"),
)
_H14_518 = (
    *_FROM_CHECKPOINT, *_INPUTS, ("model.name", "ViT-H/14"), ("data.image_size", 518), ("mesh.fsdp", 16),
)  # fmt: skip
# Networks whose sizes of the paper take minutes to compile.
_SMALL = (
    "deepvit", "localvit", "cross_vit", "t2t_vit", "dynamic_vit", "feed_forward", "efficientnet", "axial", "positions",
    "mae", "gsam", "dino", "dino_continue", "deit3", "deit3_i21k", "rope_vit", "vit5", "algoperf", "naflex",
)  # fmt: skip
CASES = {
    "digits": Case("digits.py", "v5e:2x2"),
    "digits-2-slices": Case(
        "digits.py", "v5e:2x2", slices=2,
        changes=(("mesh.fsdp", 4), ("mesh.fsdp_min_size", 1024), ("model.depth", 1)),
    ),
    "vit_s16_i1k": Case("vit_s16_i1k.py", "v5e:2x4"),
    "vit_s16_i1k-2-slices": Case("vit_s16_i1k.py", "v5e:2x2", slices=2, changes=(("mesh.fsdp", 4),)),
    "deit-S": Case("deit.py:S", "v5p:2x2x2"),
    **{name: Case(f"{name}.py:smoke", "v5e:2x2") for name in _SMALL},
    "mixer-S32": Case("mixer.py:S/32,jft300m", "v5e:8x8"),
    "bit-R50x1": Case("bit.py:S,R50x1", "v5e:8x8"),
    "vit_i1k-B16": Case("vit_i1k.py:B/16", "v5p:2x4x4"),
    "vit_i21k-L16": Case("vit_i21k.py:L/16", "v5p:4x4x4"),
    "vit_jft-H14": Case("vit_jft.py:H/14", "v5e:16x16"),
    "scaling_vit-B16": Case("scaling_vit.py:B/16", "v5e:8x8"),
    "scaling_vit-B16-v6e": Case("scaling_vit.py:B/16", "v6e:8x8"),
    "scaling_vit-G14": Case("scaling_vit.py:G/14", "v5p:8x8x16"),
    "masked_patches-B16": Case("masked_patches.py:B/16", "v5e:8x8"),
    "finetune": Case("finetune.py:imagenet2012", "v5p:2x2x2", changes=_FROM_CHECKPOINT + _INPUTS),
    "vit_s16_i1k-v6e": Case("vit_s16_i1k.py", "v6e:2x4"),
    "vit_i21k-L16-v6e": Case("vit_i21k.py:L/16", "v6e:8x8"),
    "vit_jft-H14-v6e": Case("vit_jft.py:H/14", "v6e:16x16"),
    "vit_s16_i1k-tpu7x": Case("vit_s16_i1k.py", "tpu7x:2x2x1"),
    "scaling_vit-B16-tpu7x": Case("scaling_vit.py:B/16", "tpu7x:2x4x4"),
    "finetune-H14-518": Case("finetune.py:imagenet2012", "v5e:4x4", changes=_H14_518),
    "finetune-H14-518-v6e": Case("finetune.py:imagenet2012", "v6e:4x4", changes=_H14_518),
    "finetune-G14-518": Case("finetune.py:imagenet2012", "v5p:4x4x4", changes=(*_H14_518, ("model.name", "ViT-G/14"))),
    # DINOv3's L.
    "finetune-L16-768": Case(
        "finetune.py:imagenet2012", "v5e:4x4",
        changes=(
            *_FROM_CHECKPOINT, *_INPUTS, ("model.name", "ViT-L/16"), ("data.image_size", 768), ("mesh.fsdp", 1),
            ("model.position", "none"), ("model.rope", "centred"), ("model.rope_theta", 100.0),
            ("model.registers", 4), ("model.layer_scale", "all"),
        ),
    ),
    "linear_probe": Case("linear_probe.py:imagenet2012", "v5e:2x2", changes=_FROM_CHECKPOINT + _INPUTS),
    "bit_hyperrule": Case(
        "bit_hyperrule.py:imagenet2012", "v5e:4x4",
        changes=(*_FROM_CHECKPOINT, *_INPUTS, ("model.name", "BiT-R50x1")),
    ),
    "noisy_student": Case(
        "noisy_student.py:smoke", "v5e:2x2", changes=(("model.num_classes", 10),), examples=800
    ),
    "segmentation": Case(
        "segmentation.py:smoke", "v5e:2x2",
        changes=(
            ("init_from", ""), ("model.name", "ViT-S/4"), ("model.width", 64), ("model.depth", 4), ("model.heads", 4),
            ("model.mlp_dim", 256), *_INPUTS,
        ),
    ),
    "speedrun": Case("speedrun.py:cifar10,whole_images", "v5e:2x2"),
    "folder": Case("folder.py", "v5e:2x2", changes=(("model.num_classes", 10),), examples=10_000),
}  # fmt: skip


def _parameters(state) -> dict[str, dict]:
    """{name: {"shape", "cut"}}, cut being the mesh axis of each axis."""
    leaves = zip(patterns.names(state.params), jax.tree.leaves(state.params), strict=True)
    return {
        name: {"shape": list(leaf.shape), "cut": [axis or "" for axis in leaf.sharding.spec]}
        for name, leaf in leaves
    }


def assembly_of(case: Case) -> Assembly:
    config = load_config(str(ROOT / "configs" / case.config))
    for field, value in case.changes:
        *sections, name = field.split(".")
        section = config
        for one in sections:
            section = section[one]
        section[name] = value
    return plan.make_assembly(config, examples=case.examples, num_classes=case.num_classes)


def prepared(case: Case) -> tuple[dict, compiling.Step]:
    """What can be told without compiling, and the step to compile."""
    assembly = assembly_of(case)
    where = target.find(case.topology, slices=case.slices)
    step = compiling.prepare(assembly, where)
    return {
        "config": case.config,
        "topology": case.topology,
        "slices": case.slices,
        "mesh": meshes.sizes_of(step.mesh),
        "batch_per_chip": assembly.config.batch_size / where.chips,
        "state_bytes_per_device": step.state_bytes(),
        "parameters": _parameters(step.state),
    }, step


def compiled(step: compiling.Step, slices: int) -> dict:
    """What only the compiled program tells."""
    done = compiling.compile(step)
    return {
        "arguments_bytes": done.memory.arguments,
        "temporaries_bytes": done.memory.temporaries,
        "peak_bytes": done.memory.peak,
        "collectives": summary(find(done.program, slices=slices)),
    }


def versions() -> dict:
    """Of what decides how a program is compiled."""
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name: str) -> None:
    case = CASES[name]
    told, step = prepared(case)
    parameters = told.pop("parameters")
    told |= {"versions": versions(), "compiled": compiled(step, case.slices)}
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in parameters.items()]
    text = (
        json.dumps(told, indent=1)[:-2] + ',\n "parameters": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(name)
        print(f"{name}: written", flush=True)
