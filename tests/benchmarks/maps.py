"""What segmentation and continued self-distillation cost beside the network that they train, as ratios in one run:

    taskset -c 0 python tests/benchmarks/maps.py --what=step,continue,inference,input --images=FOLDER

Two things are timed in turns, by processor time; of each the median counts. `step` and `continue` are divided by what
counting operations says, against the supervised step of the same network.
"""

import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import app, flags
from PIL import Image, ImageFilter

from vit_jax.benchmarks.input import input_pipeline
from vit_jax.benchmarks.step import Timed, assembled
from vit_jax.config import default_config
from vit_jax.evaluation import maps
from vit_jax.evaluation.forward import make_features
from vit_jax.prediction.images import find_images
from vit_jax.recipes.user_files import load_config
from vit_jax.training import state as states

WHAT = flags.DEFINE_list("what", ["step", "continue", "inference"], "what to time")
MODEL = flags.DEFINE_string("model", "ViT-S/16", "the network")
IMAGES = flags.DEFINE_string("images", None, "input: a folder of JPEG files")
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often each is timed")
BATCH = flags.DEFINE_integer("batch", 1, "images at a time; input has 16")


def main(_):
    for what in WHAT.value:
        print(f"{what}: {KINDS[what]()}", flush=True)


def config_of(recipe, size, **fields):
    """A recipe with the network, from the beginning, in float32."""
    config = load_config(recipe) if recipe else default_config()
    config.update_from_flattened_dict({
        "init_from": "", "model.name": MODEL.value, "model.dtype": "float32", "data.image_size": size,
        "data.mean": (0.5,), "data.std": (0.5,), "data.interpolation": "bilinear", "data.eval_crop": "resize",
        "batch_size": BATCH.value, "duration": "10000 steps", **fields,
    })  # fmt: skip
    return config


def step():
    """EoMT's training step at 512 pixels."""
    return over_flops(config_of("configs/segmentation.py", 512), config_of("", 512))


def continued():
    """DINOv3 continued: views of 224 and 112 pixels, the Gram teacher's of 448."""
    fields = {"data.view_sizes": (), "objective.prototypes": 4096, "optim.warmup": "0 steps"}
    return over_flops(config_of("configs/dino_continue.py", 224, **fields), config_of("", 224))


def over_flops(config, against):
    one, other = Timed(config), Timed(against)
    ratio = in_turn(
        lambda: jax.block_until_ready(one.run()), lambda: jax.block_until_ready(other.run())
    )
    flops = one.assembly.step_flops / other.assembly.step_flops
    return f"{ratio:.2f} x the network's step, FLOPs {flops:.2f} x: {ratio / flops:.2f}"


def inference():
    """EoMT's answers at 512 pixels against the features of the network alone."""
    assembly, mesh = assembled(config_of("configs/segmentation.py", 512))
    data, networks = assembly.config.data, assembly.networks
    with jax.set_mesh(mesh):
        state = states.create(assembly.init, 0, assembly.abstract_state(mesh))
        weights, own = state.weights(), state.module_weights()
        images = np.random.default_rng(0).integers(0, 256, (BATCH.value, 512, 512, 3), np.uint8)
        answers = jax.jit(maps.make_answers(networks, data))
        features = jax.jit(make_features(assembly.definition, assembly.model_config, data))
        ratio = in_turn(
            lambda: jax.block_until_ready(answers(weights, own, images)),
            lambda: jax.block_until_ready(features(weights, images)),
        )
    flops = networks.objective.flops_of(1) / assembly.model_config.flops()
    return f"{ratio:.3f} x the network's features, FLOPs {flops:.3f} x: {ratio / flops:.3f}"


def input_of_masks():
    """Images of 512 pixels with masks, enlarged by a random factor, against the same without."""
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(pathlib.Path(folder))
        both = config_of(
            "configs/segmentation.py", 512, **{"data.name": "masks", "data.path": folder}
        )
        alone = config_of(
            "",
            512,
            **{"data.name": "folder", "data.path": f"{folder}/images", "objective.name": "mae"},
        )
        for name in ("train_crop", "crop_scale"):
            alone.data[name] = both.data[name]
        rates = {}
        for _ in range(ROUNDS.value):
            for name, config in (("masks", both), ("images", alone)):
                config.batch_size = 16
                found = input_pipeline(config, steps=10)["images_per_core_second"]
                rates.setdefault(name, []).append(found)
    masks, images = (statistics.median(rates[name]) for name in ("masks", "images"))
    return f"{masks:.0f} ÷ {images:.0f} images per core-second: {masks / images:.2f}"


def write_scenes(folder):
    """The photos, with masks of eight levels of brightness, smoothed."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    for named in find_images([IMAGES.value]):
        source = pathlib.Path(named.name)
        (folder / "images" / source.name).symlink_to(source.resolve())
        with Image.open(source) as photo:
            grey = np.asarray(photo.convert("L").filter(ImageFilter.GaussianBlur(8)))
        Image.fromarray(grey // 32).save(folder / "masks" / f"{source.stem}.png")
    names = "\n".join(f"level{i},{i}" for i in range(8))
    (folder / "classes.csv").write_text(f"name,value\n{names}\n")


def in_turn(one, other):
    """The processor time of one over the other's."""
    seconds = ([], [])
    for _ in range(ROUNDS.value + 1):
        for function, times in zip((one, other), seconds, strict=True):
            began = time.process_time()
            function()
            times.append(time.process_time() - began)
    first, second = (statistics.median(times[1:]) for times in seconds)
    return first / second


KINDS = {"step": step, "continue": continued, "inference": inference, "input": input_of_masks}

if __name__ == "__main__":
    app.run(main)
