"""Noisy Student: a teacher labels images without labels, a student learns from these and from the labelled ones,
with noise, and teaches the next (arXiv 1911.04252).

vit_jax train --config=configs/noisy_student.py:L2 --workdir=DIR --config.pseudo.data=IMAGES --config.pseudo.split=train
    EfficientNet-B7 teaches L2, which teaches L2 twice more; IMAGES is a folder or the name of a data set;
vit_jax train --config=configs/noisy_student.py:smoke --workdir=DIR
    digits, 10 of each class with labels: a teacher of 300 steps, two students of 900, in two minutes on two CPU
    cores: 86.6, 88.9, 88.3 %.

Each round is a run of its own, in DIR/teacher, DIR/round_1, …; the same command continues where it was stopped. A
student keeps its teacher's answers in `pseudo_labels.npz`. The report at the end has the accuracy of every round.
Your own models and images: copy this file, and return other configs from `get_runs`; any models of the same classes do.

Expect, top-1 % on ImageNet: students B0 to B7 78.8, 81.5, 82.4, 84.1, 85.3, 86.1, 86.4, 86.9, L2 88.4.
L2 took 6 days on 2048 TPUv3 cores; then 1.5 epochs at a higher resolution: configs/efficientnet.py.

Where sources say little: every round has 14 images of the teacher's for one with a label, as the paper's first; batches
of L2 are 2,048 labelled images and these. Learning rate and length count labelled images, as there. Labels are soft.
"""

import efficientnet

from vit_jax import recipes

IMAGENET = 1_281_167


def get_runs(arg="L2"):
    teacher, student = (smoke if arg == "smoke" else paper)(arg)
    runs = {"teacher": teacher}
    for number in range(1, 3 if arg == "smoke" else 4):
        student = student.copy_and_resolve_references()
        student.pseudo.teacher = list(runs)[-1]
        runs[f"round_{number}"] = student
    return runs


def get_config(arg="L2"):
    """The last student, for `vit_jax plan`."""
    return list(get_runs(arg).values())[-1]


def paper(arg):
    (size,) = recipes.arguments(arg, size=efficientnet.SIZES)
    teacher, student = efficientnet.paper("B7", noisy=False), efficientnet.paper(size, noisy=True)
    student.pseudo.data = "jft300m"
    student.pseudo.per_class = 130_000
    student.pseudo.ratio = 14.0
    # Durations of the recipe are in epochs of the labelled images.
    epochs, share = float(student.duration.split()[0]), 1 + student.pseudo.ratio
    student.duration = f"{round(epochs * IMAGENET * share)} examples"
    student.batch_size = round(student.batch_size * share)
    in_percent = lambda text: f"{100 * float(text.split()[0]) / epochs:.4g}%"  # noqa: E731
    student.optim.warmup = in_percent(student.optim.warmup)
    student.optim.boundaries = tuple(map(in_percent, student.optim.boundaries))
    student.eval.every = in_percent(student.eval.every)
    return teacher, student


def smoke(arg):
    import digits

    teacher = digits.get_config()
    teacher.data.name = "digits_few"
    teacher.data.train_split = "few_0"
    recipes.quick(teacher, "300 steps")
    teacher.checkpoint.every = "100 steps"
    student = teacher.copy_and_resolve_references()
    student.pseudo.split = "rest_0"
    student.pseudo.per_class = 130
    student.pseudo.ratio = 7.0
    student.model.dropout = 0.1
    student.model.drop_path = 0.1
    student.duration = "900 steps"  # 300 are too few to learn with noise.
    return teacher, student
