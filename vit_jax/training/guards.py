"""What is looked at before a run may start: nothing is at stake yet, and a clear error costs nothing."""

import json

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import paths, patterns
from vit_jax.base.errors import ConfigError

# Fields of the config that a resumed run may change: they do not change what is learnt.
MAY_CHANGE = (
    r"(log|checkpoint|eval|mesh|hosts)\..*",
    r"data\.(eval_.*|threads|prefetch|on_bad_image|max_bad_images)",
    r"model\.(remat|unroll|attention|dtype_on_cpu)",
    r"nonfinite|max_skips|rollback_skip|max_rollbacks|compilation_cache|spike\..*",
)


def changed_fields(saved: dict, description: dict) -> list[str]:
    """What of two descriptions differs and would change the result, as 'field: old -> new'."""
    told = []
    for key in ("config", "classes", "training_examples"):
        old, new = (dict(_flat(json.loads(json.dumps(d[key])), key)) for d in (saved, description))
        names = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
        may = set(patterns.matching([rf"config\.({p})" for p in MAY_CHANGE], names))
        told += [f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in names if n not in may]
    return told


def _flat(tree, prefix: str):
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}")
    else:
        yield prefix, tree


def check_batch(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Raises `ConfigError` unless batches can be cut evenly over the mesh."""
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    part = config.batch_size // config.accumulate
    for name, size in (
        ("batch_size / accumulate", part),
        ("eval.batch_size", config.eval.batch_size),
    ):
        if size % replicas:
            raise ConfigError(
                f"config.{name} = {size} cannot be spread over {replicas} devices (data x fsdp); "
                f"choose a multiple of {replicas}"
            )


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled programs between runs, readable by their owner only: who can write them can
    run code in the job.
    """
    if directory:
        path = paths.locate(directory)
        if not paths.in_bucket(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(path))


def make_workdir(workdir: epath.Path) -> None:
    """Makes the folder and proves that it can be written to, before any work is done."""
    probe = workdir / f".writable-{jax.process_index()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write to --workdir={workdir}: {reason}") from error
