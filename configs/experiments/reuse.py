"""What Dynamic Vision Transformers reuse between their exits (arXiv 2105.15075, Table 6).

vit_jax train --config=configs/experiments/reuse.py:smoke --workdir=DIR
    digits, with 1 x 1, 2 x 2 and 4 x 4 tokens, three seeds each: twelve runs, six minutes of a CPU core.
vit_jax train --config=configs/experiments/reuse.py --workdir=DIR
    T2T-ViT-12 on ImageNet, one seed each (configs/dynamic_vit.py).
vit_jax exits --checkpoint=DIR/feature_reuse=True,relation_reuse=True/seed=0 --budgets=0.75,1.0,1.5
    then: accuracy over budgets, of a run.

Expect of the paper's, at the last exit: none 76.74, features 79.21, relations 78.86, both 80.00 %.
"""

from vit_jax import recipes


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", "smoke"))
    smoke = size == "smoke"
    config = recipes.beside(__file__, f"../dynamic_vit.py:{'smoke' if smoke else 'T2T-12'}")
    if smoke:
        recipes.quick(config, "400 steps")
        config.optim.lr = 2e-3
        config.model.grids = (1, 2, 4)
    settings = [
        {"model.feature_reuse": features, "model.relation_reuse": relations}
        for features in (False, True)
        for relations in (False, True)
    ]
    return recipes.vary(config, settings, seeds=3 if smoke else 1)
