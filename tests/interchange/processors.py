"""How transformers' image processors prepare photos, and how images are prepared here for a folder that has one.

    python -m tests.interchange.processors

prints the table of docs/notes/2026-11-26-checkpoints.md: differences in levels of 255 for the same decoded photo, and
the ratio of signal to noise for the file, which is decoded here at a reduced size where that is enough. DINOv3's
processor needs torchvision: in its place stands what it calls, PyTorch's antialiased resizing of floats.
"""

import json
import pathlib
import tempfile

import numpy as np
from PIL import Image

from tests import lazily
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.interchange import formats

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
PHOTOS = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "imagenet_sample"
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_BODY = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 224,
    "patch_size": 32,
}  # fmt: skip
# Family: its model and config in transformers, its processor, and how the processors of its published models are set.
FAMILIES = {
    "ViT": ("ViTModel", "ViTConfig", "ViT", _HALF | {"resample": 2}),
    "DeiT": ("DeiTModel", "DeiTConfig", "DeiT", _IMAGENET),
    "BEiT": ("BeitModel", "BeitConfig", "Beit", _HALF | {"resample": 2}),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", "Siglip", _HALF),
    "DINOv2": ("Dinov2Model", "Dinov2Config", "Bit", _IMAGENET | {"size": {"shortest_edge": 256}}),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", "DINOv3ViT", _IMAGENET),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", "CLIP", _CLIP),
}


class DINOv3Processor:
    """Rescaled, then resized as floats, then normalised."""

    image_mean, image_std = _IMAGENET["image_mean"], _IMAGENET["image_std"]

    def save_pretrained(self, folder: pathlib.Path) -> None:
        described = {
            "image_processor_type": "DINOv3ViTImageProcessorFast",
            "size": 224,
            "resample": 2,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(described | _IMAGENET))

    def __call__(self, image: np.ndarray, **_) -> dict:
        floats = torch.from_numpy(image / 255).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            floats, (224, 224), mode="bilinear", antialias=True, align_corners=False
        )
        mean, std = (np.array(x).reshape(3, 1, 1) for x in (self.image_mean, self.image_std))
        return {"pixel_values": (resized.numpy() - mean) / std}


def processor_of(family: str):
    """The image processor of a family."""
    _, _, kind, options = FAMILIES[family]
    if family == "DINOv3":
        return DINOv3Processor()
    return getattr(transformers, f"{kind}ImageProcessor")(**options)


def preprocessing(family: str, folder: pathlib.Path) -> formats.Preprocessing:
    """How images are prepared here for a small model of a family whose folder has its processor."""
    model, config, _, _ = FAMILIES[family]
    getattr(transformers, model)(getattr(transformers, config)(**_BODY)).save_pretrained(folder)
    processor_of(family).save_pretrained(folder)
    return formats.read_checkpoint(folder).preprocessing


def levels(family: str, prepared: formats.Preprocessing, photo: pathlib.Path) -> list[np.ndarray]:
    """Differences in levels of 255, (224, 224, 3) each: of the decoded photo, and of its file."""
    data = Data(
        image_size=prepared.image_size,
        eval_crop=prepared.eval_crop,
        eval_resize=prepared.eval_resize,
        interpolation=prepared.interpolation,
    )
    processor, pixels = processor_of(family), np.asarray(Image.open(photo).convert("RGB"))
    expected = np.asarray(processor(pixels, return_tensors="np")["pixel_values"])[0]
    expected = expected.transpose(1, 2, 0)
    differences = []
    for image in (pixels, photo.read_bytes()):
        ours = decode.eval_crop(image, data, name=photo.name) / 255
        ours = (ours - np.array(prepared.mean)) / np.array(prepared.std)
        differences.append((ours - expected) * np.array(processor.image_std) * 255)
    return differences


def psnr(differences: np.ndarray) -> float:
    """Decibels of differences in levels."""
    return float(10 * np.log10(255**2 / max(np.mean(differences**2), 1e-3)))


def main() -> None:
    """See above."""
    photos = sorted(PHOTOS.glob("*.JPEG"))
    print(
        "| family | largest | values that are equal | file: least | mean |\n|---|--:|--:|--:|--:|"
    )
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            prepared = preprocessing(family, pathlib.Path(folder))
        decoded, files = zip(*(levels(family, prepared, photo) for photo in photos), strict=True)
        largest = max(np.abs(x).max() for x in decoded)
        equal = np.mean([np.mean(np.abs(x) < 0.01) for x in decoded])
        noise = [psnr(x) for x in files]
        print(
            f"| {family} | {largest:.2f} | {equal:.2%} | {min(noise):.1f} dB | {np.mean(noise):.1f} dB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
