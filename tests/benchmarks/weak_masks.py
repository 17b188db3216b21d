"""Masks of photos without labels: where a trained ViT's class token looks. Real pictures for `configs/segmentation.py`
where no data set is at hand; what they show is in docs/segmentation.md.

    python -m tests.benchmarks.weak_masks --checkpoint=deit_tiny.safetensors --images=PHOTOS --out=SCENES

Of each photo the middle, 448 pixels, is written to SCENES/images, and to SCENES/masks the class token's attention
averaged over the heads of layers 8 to 11, smoothed over a patch and split by Otsu's threshold: 0 background, 1
object, 255 near the threshold, which counts nowhere.
"""

import argparse
import pathlib

import cv2
import jax
import numpy as np
from flax import nnx
from PIL import Image

import vit_jax
from vit_jax.prediction.images import find_images

SIZE = 448
LAYERS = slice(7, 11)
UNSURE = 0.08  # of the range of the smoothed attention, on both sides of the threshold
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "images", "out"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    out = pathlib.Path(options.out)
    for folder in ("images", "masks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    (out / "classes.csv").write_text("name,value\nbackground,0\nobject,1\n")
    look = attention_of_class_token(vit_jax.load(options.checkpoint, image_size=SIZE))
    for named in find_images([options.images]):
        path = pathlib.Path(named.name)
        with Image.open(path) as photo:
            image = middle(photo.convert("RGB"))
        pixels = (np.asarray(image) / 255 - MEAN) / STD
        attention = np.asarray(look(pixels[None].astype(np.float32)))
        image.save(out / "images" / f"{path.stem}.jpg", quality=92)
        Image.fromarray(mask_of(attention)).save(out / "masks" / f"{path.stem}.png")


def attention_of_class_token(model: nnx.Module):
    """A function of images (1, H, W, 3): (h, w), the mean over `LAYERS` and their heads."""
    definition, state = nnx.split(model)

    def from_class(layer):
        return {"from_class": layer["attention"][:, :, 0, 1:].mean(1)}

    @jax.jit
    def look(images):
        output = nnx.merge(definition, state)(images, capture=from_class)
        found = output.intermediates["from_class"][LAYERS]
        return found.mean((0, 1)).reshape(model.config.grid)

    return look


def middle(photo: Image.Image) -> Image.Image:
    """The square in the middle, of `SIZE` pixels."""
    scale = SIZE / min(photo.size)
    width, height = (max(SIZE, round(side * scale)) for side in photo.size)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    resized = photo.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + SIZE, top + SIZE))


def mask_of(attention: np.ndarray) -> np.ndarray:
    """(SIZE, SIZE) uint8 of attention (h, w)."""
    smooth = cv2.GaussianBlur(np.minimum(attention, np.percentile(attention, 97)), (0, 0), 1.0)
    large = cv2.resize(smooth, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    large = np.clip((large - large.min()) / np.ptp(large), 0, 1)
    threshold, _ = cv2.threshold(np.uint8(large * 255), 0, 255, cv2.THRESH_OTSU)
    mask = (large > threshold / 255).astype(np.uint8)
    mask[abs(large - threshold / 255) < UNSURE] = 255
    return mask


if __name__ == "__main__":
    main()
