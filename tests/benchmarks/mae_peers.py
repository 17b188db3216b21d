"""Our train step of a masked autoencoder beside Hugging Face's under PyTorch, in turn in one process: the
same sizes, batch and optimizer; weights are each one's own, and so are the patches that it removes.

    python tests/benchmarks/mae_peers.py [--model=B/16] [--batch_size=8] [--dtype=bfloat16] [--steps=6]

Needs `pip install transformers torch`. Prints medians, and one JSON object on the last line.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import transformers

from vit_jax.benchmarks import step
from vit_jax.benchmarks.breakdown import seconds_in_turn
from vit_jax.benchmarks.context import context
from vit_jax.recipes.user_files import load_config

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


def ours(flags) -> step.Timed:
    config = load_config(f"{CONFIGS / 'mae.py'}:{flags.model}")
    config.batch_size, config.model.dtype = flags.batch_size, flags.dtype
    config.augment.flip = False
    return step.Timed(config)


def theirs(flags, timed: step.Timed):
    """A function that makes PyTorch's next step and returns its loss: autocast and fused AdamW."""
    model, decoder = timed.assembly.model_config, timed.assembly.networks.objective.decoder
    optim, data = timed.assembly.config.optim, timed.assembly.config.data
    config = transformers.ViTMAEConfig(
        hidden_size=model.width,
        num_hidden_layers=model.depth,
        num_attention_heads=model.heads,
        intermediate_size=model.mlp_dim,
        patch_size=model.patch,
        decoder_hidden_size=decoder.width,
        decoder_num_hidden_layers=decoder.depth,
        decoder_num_attention_heads=decoder.heads,
        decoder_intermediate_size=decoder.mlp_dim,
        norm_pix_loss=True,
        attn_implementation="sdpa",
    )
    net = transformers.ViTMAEForPreTraining(config).train()
    optimizer = torch.optim.AdamW(
        net.parameters(), 1e-4, betas=(0.9, optim.b2), weight_decay=optim.weight_decay, fused=True
    )
    raw = torch.tensor(timed.batch["image"].__array__())
    mean, std = (255 * torch.tensor(x).float()[:, None, None] for x in (data.mean, data.std))

    def run():
        images = ((raw.permute(0, 3, 1, 2).float() - mean) / std).contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=flags.dtype == "bfloat16"):
            loss = net(images).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=6)
    flags = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    timed = ours(flags)
    run = theirs(flags, timed)
    times = seconds_in_turn([timed.run, run], flags.steps)
    medians = dict(zip(("ours", "transformers"), map(statistics.median, times), strict=True))
    losses = {"ours": float(timed.metrics["loss"]), "transformers": run()}
    for name, seconds in medians.items():
        print(f"{name:<13} {seconds:.3f} s  {flags.batch_size / seconds:.2f} images/s")
    print(f"images/s, ours over theirs: {medians['transformers'] / medians['ours']:.2f}")
    print(json.dumps({"seconds": medians, "losses": losses} | vars(flags) | context()))


if __name__ == "__main__":
    main()
