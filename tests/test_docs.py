"""The commands of README.md and docs/*.md, as printed. What needs data, weights or places gets small
stand-ins under the names that the guides use; what needs accelerators or hours goes as far as
--dry_run, or up to the first thing that takes long.
"""

import importlib.util
import operator
import re
import shlex
import shutil

import cv2
import jax
import numpy as np
import pytest

import vit_jax
from tests.guide_commands import (
    GUIDES,
    LINES,
    ROOT,
    SPANS,
    is_synopsis,
    lines_of,
    ours,
    shell_words,
    span_texts_of,
)
from vit_jax.base import settings
from vit_jax.benchmarks import early_exit, step
from vit_jax.benchmarks import input as step_input
from vit_jax.commands import flags as cli
from vit_jax.config import config_class, default_config
from vit_jax.data.preparation.prepare import prepare
from vit_jax.interchange import formats
from vit_jax.interchange.loading import convert
from vit_jax.models import registry
from vit_jax.planning import dry_run, fit, plan
from vit_jax.recipes import user_files
from vit_jax.studies import sweep
from vit_jax.training import loop

# Programs that are not ours, and what their lines are for.
OTHERS = {
    ".": "enters an environment",
    "cd": "enters a clone",
    "curl": "needs a network",
    "docker": "builds an image",
    "gcloud": "needs Google Cloud",
    "git": "needs a network",
    "kubectl": "needs a cluster",
    "mkdir": "makes what stands in already",
    "scancel": "needs SLURM",
    "tail": "follows a log of SLURM",
    "xprof": "serves the pages of a trace until it is stopped",
    "tar": "needs ImageNet-21k",
}
# Of commands that cannot run here, only the flags are parsed.
PARSED = {
    "zero_shot": "needs a run of images and texts; tests/objectives/test_image_text.py",
    "word_maps": "needs a run of images and texts; tests/objectives/test_dino_txt.py",
    "dino_txt.py": "needs a model with a class token; tests/objectives/test_dino_txt.py",
    "('features',": "needs another model; tests/objectives/test_sum.py",
    "chosen": "needs several labels an image; tests/evaluation/test_several_labels.py, interchange/test_answers.py",
    "classify ": "trains; tests/studies/test_classify.py",
    "prepare cifar10": "downloads",
    "prepare oxford_iiit_pet": "downloads",
    "gram.py:cifar10": "needs CIFAR-10 as files; tests/test_experiments.py",
    "gs://bucket/": "needs a bucket",
    "--private": "uploads; tests/interchange/test_push.py",
    "--to=onnx": "needs onnx; tests/integration/test_export.py",
    "serve --": "runs until it is stopped; tests/serving",
    "inspect --": "takes seconds; tests/inspection",
    "--out=maps": "needs a model that segments; tests/integration/test_segmentation.py",
    "--layers=3,7,11": "needs twelve blocks; tests/test_api.py",
    "--last=": "needs a run with several checkpoints; tests/interchange/test_averaging.py",
    "report /data": "needs runs; tests/studies",
    "report gs://": "needs runs; tests/integration/test_pods.py",
    "--topology=h100": "needs the compiler for CUDA; tests/planning/test_gpu_golden.py",
    "models --markdown": "counts every model; tests/models/test_listing.py",
}
# Commands that end with the sentence that their data is not there.
NOT_PREPARED = {
    "imagenet2012_real": "needs ImageNet",
    "--suite=": "needs ImageNet",
    "vtab --checkpoint": "needs its data sets",
    "scaling_vit.py:G/14": "JFT is not public",
    "name=oxford_iiit_pet --workdir": "needs its data set",
    "lost_and_found": "needs its data set",
}
# Commands that end with the sentence that the checkpoint, which stands in for a larger one, does not fit.
NOT_FITTING = (
    "mae.py:B/16 --workdir=DIR --config.init_from=CHECKPOINT",
    "digits_finetune --config.init_from=runs/digits",
)
# Commands for a model with exits, which the one that stands in has not.
EARLY = ("exits --checkpoint", "--budget=", "--threshold=")
# Commands for a model with more blocks than the one that stands in.
DEEP = ("segmentation.py --config", "segmentation.py:smoke", "segmentation.py:panoptic")
MASK = cv2.imencode(".png", np.eye(32, dtype=np.uint8))[1].tobytes()
# What stands in for data, weights and places: what is said, and what is taken.
STAND_INS = {
    r"--workdir=.*": "--workdir={folder}/new",
    r"--checkpoint=.*": "--checkpoint={folder}/trained",
    r"--out=(.*\.(?:zip|npz))": r"--out={folder}/\1",
    r"--out=(?!.*\.(?:zip|npz)$).*": "--out={folder}/prepared",
    r"--config.data.path=(IMAGES|DIR|/data/images)": "--config.data.path={folder}/IMAGES",
    r"--config.data.path=SCENES": "--config.data.path={folder}/SCENES",
    r"gs://BUCKET/raw|/data/images": "{folder}/IMAGES",
    r"gs://BUCKET/data": "{folder}/SET",
    r"--config.data.path=(SET|/mnt/BUCKET/data|gs://BUCKET/data|/shared/data)": "--config.data.path={folder}/SET",
    r"--config.model.num_classes=21841": "--config.model.num_classes=2",
    r"--register=.*": "--register={folder}/mine.py",
    r"--config=WORKDIR/(.*)": r"--config={folder}/trained/\1",
    r"(.*=|)(/data/runs/b16|runs/digits|CHECKPOINT|WORKDIR|RUN\d)": r"\1{folder}/trained",
    r'(.*=\(")CHECKPOINT(",\))': r"\1{folder}/trained\2",
    r'(.*=\(")CHECKPOINT(", ")CHECKPOINT("\))': r"\1{folder}/trained\2{folder}/trained\3",
    r"--image_size=512x1024": "--image_size=224x336",  # two windows
}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_a_shell_splits_the_commands_of_a_guide_as_this_test_does(guide, tmp_path):
    blocks = re.findall(r"^```bash\n(.*?)^```", guide.read_text(), flags=re.M | re.S)
    found = [words for block in blocks for words in shell_words(block, tmp_path)]
    ours = [
        words[words.index("vit_jax") :] for _, words in lines_of(guide) if "vit_jax" in words[:2]
    ]
    assert all(words in ours for words in found)
    for _, text in span_texts_of(guide):
        assert shell_words(f"vit_jax {text}", tmp_path) == [["vit_jax", *shlex.split(text)]]


class Enough(Exception):
    """What comes next takes long, or needs what is not here."""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A folder with small things under the names that the guides use."""
    folder = tmp_path_factory.mktemp("guides")
    random = np.random.default_rng(0)
    for *place, number in np.ndindex(2, 2, 4):
        split, label = ("train", "test")[place[0]], "ab"[place[1]]
        for name, channels, suffix in (("IMAGES", 3, "png"), ("SENTINEL", 13, "npy")):
            path = folder / name / split / label / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = random.integers(0, 255, (32, 32, channels), np.uint8)
            np.save(path, image) if suffix == "npy" else cv2.imwrite(str(path), image)
    image = folder / "IMAGES/train/a/0.png"
    for kind, content in (("images", image.read_bytes()), ("masks", MASK)):
        for split in ("train", "val"):
            path = folder / f"SCENES/{kind}/{split}/0.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
    (folder / "SCENES/classes.csv").write_text("name,value\nroad,0\ncar,1\n")
    (folder / "PAIRS").mkdir()
    captions = [f"../IMAGES/train/{label}/{i}.png,a {label}" for label in "ab" for i in range(4)]
    (folder / "PAIRS/captions.csv").write_text("\n".join(["path,caption", *captions]))
    for name in ("cat.jpg", "dog.jpg"):
        (folder / name).write_bytes(image.read_bytes())
    (folder / "mine.py").write_text("")
    (folder / "CLASSES").symlink_to(folder / "IMAGES")
    (folder / "photos").symlink_to(folder / "IMAGES")
    (folder / "configs").symlink_to(ROOT / "configs")
    prepare(str(folder / "IMAGES"), str(folder / "SET"))
    config = vit_jax.load_config(str(ROOT / "configs/folder.py"))
    config.update_from_flattened_dict({
        "data.path": str(folder / "IMAGES"), "model.name": "ViT-mu/16", "model.pool": "token",
        "model.position": "learned", "batch_size": 8, "duration": "1 steps", "optim.warmup": "0 steps",
        "augment.randaugment_layers": 0, "augment.mixup": 0.0, "compilation_cache": "", "log.tensorboard": False,
    })  # fmt: skip
    vit_jax.train(config, folder / "trained")
    for name in ("B_16.npz", "S_16.npz"):
        convert(folder / "trained", folder / name, "official")
    wide = registry.model_config("ViT-mu/16", image_size=(224, 448), num_classes=2)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), registry.abstract(wide)[1])
    formats.write_checkpoint(
        formats.LoadedCheckpoint(wide, zeros), folder / "panorama.npz", "official"
    )
    convert(folder / "S_16.npz", folder / "hf_folder", "huggingface", activation="gelu")
    convert(folder / "S_16.npz", folder / "vit.safetensors", "timm", activation="gelu")
    return folder


def once_for_all_seeds(dry_run):
    """`dry_run`, done once for the runs of an experiment that differ in their seeds alone."""
    found = {}

    def run(config, *others, **options):
        unseeded = repr(config.to_dict() | {"seed": 0})
        if unseeded not in found:
            found[unseeded] = dry_run(config, *others, **options)
        return found[unseeded]

    return run


@pytest.fixture
def inside(sandbox, monkeypatch):
    """In that folder, where nothing that takes long is done."""

    def enough(*_, **__):
        raise Enough

    monkeypatch.chdir(sandbox)
    monkeypatch.setenv("HOME", str(sandbox))  # where TFDS would keep its data
    monkeypatch.setattr(dry_run, "dry_run", once_for_all_seeds(dry_run.dry_run))
    monkeypatch.setattr(plan, "make_plan", enough)
    monkeypatch.setattr(fit, "fit", lambda config, target, price_per_chip_hour, **data: (
        plan.make_assembly(config, **data) and enough()
    ))  # fmt: skip
    monkeypatch.setattr(sweep, "train", enough)
    monkeypatch.setattr(sweep, "_metric_order_of", enough)  # which opens the data
    for name in ("step", "inference"):
        monkeypatch.setattr(step, name, enough)
    monkeypatch.setattr(early_exit, "of_config", enough)
    monkeypatch.setattr(step_input, "input_pipeline", enough)
    for name in ("new", "prepared", "out", "b16", "b16.npz", "run"):
        path = sandbox / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return sandbox


# Launches are in tests/launch/test_guides.py.
@pytest.mark.parametrize("text", [text for text, words in ours().items() if words[0] != "launch"])
def test_a_command_of_the_guides_is_understood_as_printed(command, inside, monkeypatch, text):
    words = ours()[text]
    for said, taken in STAND_INS.items():
        pattern, by = re.compile(said), taken.replace("{folder}", str(inside))
        words = [match.expand(by) if (match := pattern.fullmatch(w)) else w for w in words]
    if any(part in text for part in PARSED):
        parse = cli.parse_flags

        def parse_alone(*arguments, **options):
            parse(*arguments, **options)
            raise Enough

        monkeypatch.setattr(cli, "parse_flags", parse_alone)
    elif words[0] == "train" and "--help" not in words:
        words = [*words, "--dry_run"]
    few = {f"--config.data.path={inside}/{name}" for name in ("SET", "SCENES")}
    if words[0] in ("train", "plan") and few & set(words):
        words.append("--config.optim.warmup=0 steps")  # few images make few steps
    try:
        code, out, err = command(*words)
    except Enough:
        return
    if any(part in text for part in EARLY):
        assert code == 2 and "images cannot leave this model early" in err
    elif any(part in text for part in NOT_FITTING):
        assert code == 2 and "config.init_from: " in err
    elif any(part in text for part in NOT_PREPARED):
        assert code == 2 and " is not prepared in " in err
    elif any(part in text for part in DEEP):
        assert code == 2 and "config.objective.blocks = " in err
    else:
        assert code == 0 and out, err


def test_every_other_line_is_a_script_of_ours_or_has_a_reason(inside):
    for where, words in [*LINES, *SPANS]:
        program, flags = words[0], [w.split("=")[0] for w in words if w.startswith("--")]
        flags = flags[: flags.index("--")] if "--" in flags else flags
        if program in OTHERS or "vit_jax" in words[:2] or program.startswith("--"):
            continue
        if program == "pip":
            continue  # see the test of extras
        if program in ("python", "python3") and words[1:2] == ["-m"]:
            assert importlib.util.find_spec(words[2]), where
            continue
        if words[1:2] == ["-c"]:
            exec(words[2], {})
            continue
        scripts = [ROOT / word for word in words if (ROOT / word).exists()]
        assert scripts, (where, words)
        text = "".join(p.read_text() for p in scripts if p.is_file())
        if scripts[0].name == "quickstart.sh":
            text += (ROOT / "launch/quickstart.py").read_text()
        for flag in flags if program != "sbatch" else ():
            assert re.search(rf"{flag}\b|\b{flag[2:]}\b", text), (where, flag)


def test_flags_between_backquotes_are_flags_with_values_that_they_can_have(inside):
    known = "".join(path.read_text() for path in (ROOT / "vit_jax/commands").glob("*.py"))
    files = [p for p in (ROOT / "launch").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    scripts = "".join(p.read_text() for p in files)
    for where, words in SPANS:
        if not words[0].startswith("--") or is_synopsis(words):
            continue
        recipe = next((w for w in words if w.startswith("--config=")), "")
        config = user_files.load_config(recipe.partition("=")[2]) if recipe else default_config()
        for word in words:
            flag, equals, value = word.removeprefix("--").partition("=")
            if flag.startswith("config."):
                name = flag.removeprefix("config.")
                # A name of something to be filled in is no value.
                change = [(name, value)] if equals and not re.fullmatch("[A-Z_]+", value) else []
                settings.change(config, config_class(), change)
            elif flag == "grid":
                operator.attrgetter(value.partition("=")[0] or "optim.lr")(config)
            else:
                assert f'"{flag}"' in known or re.search(rf"\b{flag}\b", scripts) or flag in (
                    "config", "help", "workdir"
                ), (where, word)  # fmt: skip


def test_extras_of_the_guides_exist():
    setup = (ROOT / "setup.py").read_text()
    for guide in GUIDES:
        for extra in re.findall(r"['\"](?:vit_jax|\.)\[([\w-]+)\]", guide.read_text()):
            assert f'"{extra}": ' in setup, (guide.name, extra)


@pytest.mark.parametrize(
    ("guide", "trains"),
    [("README.md", []), ("docs/checkpoints.md", []), ("docs/python.md", ["/tmp/digits"])],
)
def test_the_python_of_a_guide_runs(inside, monkeypatch, guide, trains):
    trained = []
    monkeypatch.setattr(loop, "train", lambda config, workdir, **_: trained.append(workdir))
    create = registry.create_model

    def small(name, **options):
        sizes = {"image_size": 128} | options
        return create("ViT-mu/16", **sizes | {"num_classes": 2} if name == "ViT-B/16" else options)

    monkeypatch.setattr(registry, "create_model", small)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(), re.S))
    exec(re.sub("/data/runs/b16|runs/digits", f"{inside}/trained", code), {})
    assert trained == trains


def test_pages_and_pictures_that_the_guides_link_to_exist_and_pictures_are_small():
    linked = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        linked |= {(page.parent / target).resolve() for target in targets if "://" not in target}
    assert [path for path in linked if not path.exists()] == []
    pictures = set((ROOT / "docs" / "figures").iterdir())
    assert pictures <= linked and all(path.stat().st_size <= 40_000 for path in pictures)


def test_every_promise_names_a_test_that_would_break():
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 15 and named <= written
