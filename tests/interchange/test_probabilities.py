"""What makes probabilities of logits, softmax or sigmoid: it is read from a checkpoint, and every answer follows it."""

import json

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests import lazily
from tests.repeats import slow_unless
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import summary
from vit_jax.prediction import predict
from vit_jax.prediction.images import named_images
from vit_jax.prediction.overrides import load_for_images
from vit_jax.serving.network import Network

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

BODY = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12, patch_size=4)
WIDE = BODY | dict(intermediate_size=24)
TEXT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
    max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
BOTH = dict(vision_config=WIDE, text_config=TEXT)
PATCHES = {name: size for name, size in WIDE.items() if name != "image_size"} | dict(num_patches=9)
CONVOLUTIONS = {
    "Bit": dict(depths=[1, 1], hidden_sizes=[256, 512], embedding_size=64),
    "EfficientNet": dict(
        width_coefficient=0.5, depth_coefficient=0.1, hidden_dim=640, depthwise_padding=[],
        dropout_rate=0, drop_connect_rate=0, image_size=64,
    ),
}  # fmt: skip
SIDE = 12
# Class: its config's class and fields.
CLASSIFIERS = {
    "ViTForImageClassification": ("ViTConfig", WIDE),
    "DeiTForImageClassification": ("DeiTConfig", WIDE),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", WIDE),
    "Dinov2ForImageClassification": ("Dinov2Config", BODY),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", BODY),
    "ViTMSNForImageClassification": ("ViTMSNConfig", WIDE),
    "IJepaForImageClassification": ("IJepaConfig", WIDE),
    "BeitForImageClassification": ("BeitConfig", WIDE),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", WIDE),
    "SiglipForImageClassification": ("SiglipConfig", BOTH),
    "CLIPForImageClassification": ("CLIPConfig", BOTH),
    "Siglip2ForImageClassification": (
        "Siglip2Config",
        dict(vision_config=PATCHES, text_config=TEXT),
    ),
    "BitForImageClassification": ("BitConfig", CONVOLUTIONS["Bit"]),
    "EfficientNetForImageClassification": ("EfficientNetConfig", CONVOLUTIONS["EfficientNet"]),
}
NAMES = {0: "rain", 1: "snow", 2: "fog"}
QUICK = {"ViTForImageClassification"}


def build(folder, name, **stated):
    """A folder of a model of transformers with weights that hide nothing, and the model."""
    config, fields = CLASSIFIERS[name]
    named = {"id2label": NAMES, "label2id": {v: k for k, v in NAMES.items()}}
    if stated.get("num_labels") == 1:
        named = {}
    noise = 0.01 if fields in CONVOLUTIONS.values() else 0.2
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**fields, **named | stated))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    side = fields.get("image_size", SIDE)
    processor = {
        "image_processor_type": "ViTImageProcessor", "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def picture(seed=0, side=SIDE):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def their_logits(model, image):
    x = torch.tensor(np.float32(image[None]) / 127.5 - 1).permute(0, 3, 1, 2)
    inputs = {"pixel_values": x}
    if model.config.model_type == "siglip2":
        patch, side = WIDE["patch_size"], SIDE // WIDE["patch_size"]
        patches = x.reshape(1, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        inputs = {
            "pixel_values": patches.reshape(1, side * side, -1),
            "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[side, side]]),
        }
    with torch.no_grad():
        return model(**inputs).logits[0]


def assert_answers(prediction, expected):
    """Names and probabilities of a prediction are these, (classes,)."""
    names = list(NAMES.values()) if len(expected) > 1 else ["0"]
    ours = dict(zip(prediction.names, prediction.probabilities, strict=True))
    np.testing.assert_allclose([ours[name] for name in names], expected, atol=1e-6)


@pytest.mark.parametrize("name", slow_unless(QUICK, CLASSIFIERS))
@pytest.mark.parametrize(
    "stated",
    [
        {"problem_type": "multi_label_classification"},
        {"num_labels": 1},
        {"problem_type": "single_label_classification"},
    ],
)
def test_probabilities_are_those_of_transformers(tmp_path, name, stated):
    model = build(tmp_path, name, **stated)
    image = picture(side=CLASSIFIERS[name][1].get("image_size", SIDE))
    logits = their_logits(model, image)
    one_class = stated.get("problem_type") == "single_label_classification"
    expected = logits.softmax(-1) if one_class else logits.sigmoid()
    assert_answers(vit_jax.load_run(tmp_path)(image, topk=3), expected.numpy())


def test_a_problem_type_that_transformers_does_not_know_is_refused(tmp_path):
    build(tmp_path, "ViTForImageClassification")
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"problem_type": "multi-label"}))
    with pytest.raises(CheckpointError, match="'multi-label', .* multi_label_classification"):
        vit_jax.load_run(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weather")
    build(folder, "ViTForImageClassification", problem_type="multi_label_classification")
    for number, name in NAMES.items():
        (folder / "photos" / name).mkdir(parents=True)
        Image.fromarray(picture(number)).save(folder / "photos" / name / "0.png")
    return folder


def test_predict_and_serve_answer_with_sigmoids_unless_the_field_says_softmax(folder):
    loaded = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    logits = their_logits(loaded, picture())
    for settings, expected in (
        ([], logits.sigmoid()),
        ([("objective.loss", "softmax")], logits.softmax(-1)),
    ):
        run = load_for_images(folder, settings, "predict")
        network = Network(run, 1)
        np.testing.assert_allclose(network.classify([picture()])[0], expected, atol=1e-6)
        predicted = next(predict.predict(run, named_images(picture())[0], topk=3, batch_size=1))
        assert_answers(predicted, expected)


@pytest.mark.slow
def test_evaluate_measures_the_loss_of_sigmoids_unless_the_field_says_softmax(folder):
    run = vit_jax.load_run(folder)
    photos = {"data": folder / "photos", "data__eval_split": "train", "data__holdout": 0.0}
    summed = run.evaluate(**photos)["loss"]
    softmax = run.evaluate(**photos, objective__loss="softmax")["loss"]
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    logits = torch.stack([their_logits(model, picture(number)) for number in NAMES])
    functional = torch.nn.functional
    expected = functional.binary_cross_entropy_with_logits(logits, torch.eye(3), reduction="none")
    assert summed == pytest.approx(float(expected.sum(-1).mean()), rel=1e-5)
    assert softmax == pytest.approx(
        float(functional.cross_entropy(logits, torch.arange(3))), rel=1e-5
    )


def test_show_says_it_and_what_is_written_says_it_again(folder, tmp_path):
    shown = summary.summarize(folder)
    assert shown["probabilities"] == "sigmoid" and "sigmoid" in summary.text(shown)
    run = vit_jax.load_run(folder)
    expected = run(picture(), topk=3)
    for form in ("orbax", "huggingface"):
        run.save(tmp_path / form, format=form)
        again = vit_jax.load_run(tmp_path / form)(picture(), topk=3)
        assert again.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    run.save(tmp_path / "again", format="huggingface")
    stated = json.loads((tmp_path / "again" / "config.json").read_text())
    assert stated["problem_type"] == "multi_label_classification"


@pytest.mark.slow
def test_an_exported_program_gives_sigmoids(folder, tmp_path):
    import onnxruntime

    run = vit_jax.load_run(folder)
    description = run.export(str(tmp_path / "m.onnx"))
    assert description["probabilities"] == "sigmoid"
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (answer,) = session.run(None, {session.get_inputs()[0].name: picture()[None]})
    by_name = dict(zip(run.classes, answer[0], strict=True))
    prediction = run(picture(), topk=3)
    for name, value in zip(prediction.names, prediction.probabilities, strict=True):
        assert by_name[name] == pytest.approx(value, abs=1e-6)
