"""Runs of the two engines as curves: ours through `vit_jax.train`, theirs in a plain loop of PyTorch."""

import json
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

import vit_jax
from tests.parity.comparison import TENTHS


def train_ours(config, seed: int, quantities: dict[str, str]) -> dict[str, np.ndarray]:
    """The curves of a run of vit_jax.

    Args:
      config: of a recipe; its duration is a number of steps that `TENTHS` divides.
      seed: of everything random.
      quantities: names in metrics.jsonl by the names of the curves.

    Returns:
      (TENTHS,) for each: the mean over the tenth of what training logs, or what the evaluation at its end finds.
    """
    config = config.copy_and_resolve_references()
    every = f"{int(config.duration.split()[0]) // TENTHS} steps"
    config.seed, config.log.tensorboard = seed, False
    config.eval.every = config.log.every = every
    config.checkpoint.every, config.audit.every = "0 steps", 0
    with tempfile.TemporaryDirectory() as workdir:
        vit_jax.train(config, workdir)
        lines = map(json.loads, (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines())
        curves = {name: [] for name in quantities}
        first, *lines = lines
        for line in lines:
            for name, logged in quantities.items():
                if logged in line:
                    curves[name].append(line[logged])
    steps = int(every.split()[0])
    for name, logged in quantities.items():
        if logged in first:  # the first step is logged alone, and belongs to the first tenth
            curves[name][0] += (first[logged] - curves[name][0]) / steps
    return {name: np.array(values) for name, values in curves.items()}


def train_theirs(
    model: torch.nn.Module,
    batches: Iterable,
    loss_of: Callable,
    optimizer: torch.optim.Optimizer,
    rate_of: Callable[[int], float],
    *,
    steps: int,
    evaluate: Callable[[torch.nn.Module], dict[str, float]],
    clip: float = 0.0,
    average=None,
    before_update: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """The curves of a run of PyTorch.

    Args:
      model: is trained.
      batches: at least `steps`.
      loss_of: of (model, batch).
      rate_of: the learning rate as a function of the number of updates made.
      evaluate: what is measured at the end of each tenth, by the names of the curves.
      clip: largest norm of the gradient; 0: none.
      average: with `update(model)` and the averaged `module`, which is then evaluated.
      before_update: called once gradients are there, before they are clipped.

    Returns:
      (TENTHS,) for 'loss', the mean over the tenth, and for each of what `evaluate` gives.
    """
    losses, curves = [], {"loss": []}
    for step, batch in zip(range(steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        before_update()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if average is not None:
            average.update(model)
        losses.append(loss.item())
        if (step + 1) % (steps // TENTHS) == 0:
            curves["loss"].append(np.mean(losses))
            losses.clear()
            judged = model if average is None else average.module
            judged.eval()
            with torch.no_grad():
                for name, value in evaluate(judged).items():
                    curves.setdefault(name, []).append(value)
            model.train()
    return {name: np.array(values) for name, values in curves.items()}


def checkpoint_of(config) -> str:
    """The file, in timm's format, of the model that a run of this config trains, from which others start."""
    config.log.tensorboard, config.checkpoint.every = False, "0 steps"
    folder = pathlib.Path(tempfile.mkdtemp())
    vit_jax.train(config, folder / "run")
    vit_jax.load_run(folder / "run").save(folder / "timm.safetensors", format="timm")
    return str(folder / "timm.safetensors")


def epochs(count: int, batch_size: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Indices of batches as a loader that shuffles and drops the last, smaller one gives them, epoch after epoch."""
    while True:
        order = random.permutation(count)
        for first in range(0, count - batch_size + 1, batch_size):
            yield order[first : first + batch_size]


def cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Callable[[int], float]:
    """The learning rate after so many updates: a linear rise from 0, then half a cosine."""

    def rate(made: int) -> float:
        if made < warmup:
            return peak * made / warmup
        share = (made - warmup) / (steps - warmup)
        return end + (peak - end) * (1 + math.cos(math.pi * share)) / 2

    return rate


def accuracy_of(images: torch.Tensor, labels: torch.Tensor) -> Callable:
    """Evaluates a classifier, a function of images that gives logits."""

    def evaluate(model) -> dict[str, float]:
        logits = torch.cat([model(part) for part in images.split(500)])
        return {"accuracy": (logits.argmax(1) == labels).float().mean().item()}

    return evaluate


def split_by_decay(model: torch.nn.Module, decay: float, plain: Callable[[str], bool]) -> list:
    """Parameter groups: weights of layers with decay, vectors and what `plain` names without."""
    named = list(model.named_parameters())
    free = [p for n, p in named if p.ndim == 1 or plain(n)]
    rest = [p for n, p in named if not (p.ndim == 1 or plain(n))]
    return [{"params": rest, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
