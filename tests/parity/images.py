"""CIFAR-10's images as the peers of a row read them: from the tar file, by Pillow."""

import functools
import io
import pathlib
import tarfile

import numpy as np
import PIL.Image

DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
CIFAR = DATA / "cifar10_small_jpeg.tar"
CLASSES = 10


@functools.cache
def cifar(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) uint8 and labels (n,) of 'train', 200 a class, or 'test', 100 a class."""
    images, names = [], []
    with tarfile.open(CIFAR) as tar:
        for member in tar:
            *_, part, name, file = member.name.split("/")
            if part == split and file.endswith(".jpg"):
                with PIL.Image.open(io.BytesIO(tar.extractfile(member).read())) as image:
                    images.append(np.asarray(image.convert("RGB")))
                names.append(name)
    labels = np.unique(names, return_inverse=True)[1]
    return np.stack(images), labels


def normalized(images: np.ndarray):
    """(n, H, W, 3) uint8 -> (n, 3, H, W) float32 in [-1, 1], of PyTorch."""
    import torch

    return torch.from_numpy(images.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2).contiguous()
