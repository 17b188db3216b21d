"""Damaged files for what reads files of strangers:

    python -m tests.fuzz images|checkpoints [--seconds=60 | --count=20] [--seed=0]

Of each comes a result, or the one error that a caller expects; anything else ends it, with the file
written to fuzz-failure.bin. Prints a JSON object: files, those refused, and the most memory in MB
beyond what it took to begin.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from tests.data.damage import damaged, whole_files

HUB = ("config.json", "preprocessor_config.json", "model.safetensors")


def images() -> tuple[dict[str, bytes], Callable[[str, bytes], bool]]:
    """Files, and what decodes one: whether it was refused."""
    from vit_jax.data.decoding import decode
    from vit_jax.data.options import Data

    files = whole_files()
    options = {"eval_crop": "resize", "max_pixels": 2**20}

    def read(kind: str, file: bytes) -> bool:
        channels = 5 if "5" in kind or kind == "npy" else 3
        try:
            data = Data(image_size=9, channels=channels, **options)
            crop = decode.eval_crop(file, data, name="x")
            assert crop.dtype == np.uint8 and crop.shape == (9, 9, channels)
        except decode.BadImage as error:
            assert len(str(error)) < 500, str(error)[:500]
            return True
        return False

    return files, read


def checkpoints() -> tuple[dict[str, bytes], Callable[[str, bytes], bool]]:
    """Files of small checkpoints, and what reads one: whether it was refused."""
    import jax

    from vit_jax.base.errors import UserError
    from vit_jax.interchange import checkpoint_file, formats

    folder = pathlib.Path(tempfile.mkdtemp())
    files, numbers = _small_checkpoints(folder), itertools.count()

    def read(kind: str, file: bytes) -> bool:
        place = folder / str(next(numbers))
        path = place / kind
        path.parent.mkdir(parents=True)
        if kind in HUB:  # the other files of its folder are whole
            for name in HUB:
                (place / name).write_bytes(files[name])
        path.write_bytes(file)
        path = place if kind in HUB else path
        try:
            found = formats.read_checkpoint(path, hints={"heads": 2})
            jax.tree.map(np.asarray, (found.params, found.variables))
        except UserError as error:
            assert len(str(error)) < 50_000, str(error)[:500]
            return True
        finally:
            checkpoint_file.forget()
            for one in place.iterdir():
                one.unlink()
            place.rmdir()
        return False

    return files, read


def _small_checkpoints(folder: pathlib.Path) -> dict[str, bytes]:
    """A small ViT in every container."""
    import jax
    import torch

    from vit_jax.interchange import formats, safetensors
    from vit_jax.models import registry

    options = {"image_size": 8, "depth": 1, "width": 8, "mlp_dim": 16, "heads": 2, "num_classes": 3}
    config = registry.model_config("ViT-mu/4", epsilon=1e-6, **options)
    weights = jax.tree.map(np.asarray, registry.initialize(config, jax.random.key(0)))
    named, prepared = ("a", "b", "c"), formats.Preprocessing(8)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, weights, named, prepared), folder / "own.npz", "official"
    )
    config = dataclasses.replace(config, activation="gelu")
    checkpoint = formats.LoadedCheckpoint(config, weights, named, prepared)
    formats.write_checkpoint(checkpoint, folder / "own.safetensors", "timm")
    formats.write_checkpoint(checkpoint, folder / "hub", "huggingface")
    tensors, _ = safetensors.read(folder / "own.safetensors")
    state = {name: torch.tensor(np.array(tensor)) for name, tensor in tensors.items()}
    saved = {"state_dict_ema": state, "epoch": 3, "args": {"lr": 0.1}}
    torch.save(saved, folder / "zip.pth")
    torch.save(saved, folder / "old.pth", _use_new_zipfile_serialization=False)
    paths = [*folder.glob("*.*"), *(folder / "hub" / name for name in HUB)]
    return {path.name: path.read_bytes() for path in paths}


def rounds(files: dict[str, bytes], seed: int) -> Iterator[tuple[str, bytes]]:
    """One damaged file of each kind after the other, without end."""
    random = np.random.default_rng(seed)
    while True:
        for kind, file in files.items():
            yield from ((kind, one) for one in damaged(file, 1, random))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("images", "checkpoints"))
    parser.add_argument("--seconds", type=float, default=0.0, help="of processor time")
    parser.add_argument(
        "--count", type=int, default=20, help="files of each kind, without --seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files, read = {"images": images, "checkpoints": checkpoints}[options.what]()
    for kind, file in files.items():
        assert not read(kind, file), kind
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, count, refused, slowest = time.process_time(), 0, 0, 0.0
    for kind, file in rounds(files, options.seed):
        started = time.process_time()
        if options.seconds and started - began >= options.seconds:
            break
        if not options.seconds and count == options.count * len(files):
            break
        try:
            refused += read(kind, file)
        except BaseException:
            pathlib.Path("fuzz-failure.bin").write_bytes(file)
            print(f"file {count}, {kind}")
            raise
        count, slowest = count + 1, max(slowest, time.process_time() - started)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result = {"files": count, "refused": refused, "megabytes": round(peak)}
    spent = {"seconds": time.process_time() - began, "slowest_seconds": slowest}
    print(json.dumps(result | {name: round(value, 2) for name, value in spent.items()}))


if __name__ == "__main__":
    main()
