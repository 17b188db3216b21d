"""A run that began with another version of the pixels goes on, and says so."""

from vit_jax.checkpoints import reading
from vit_jax.training import loop, with_data


def test_a_run_with_other_pixels_resumes_with_a_warning(tiny_config, tmp_path, monkeypatch, caplog):
    config = tiny_config(**{"duration": "2 steps", "checkpoint.every": "2 steps"})
    with monkeypatch.context() as earlier:
        earlier.setattr(with_data, "PIXELS", 1)
        loop.train(config, tmp_path)
    assert reading.read_description(reading.find_checkpoint(tmp_path))["pixels"] == 1
    assert "crops of the same images differ" not in caplog.text
    assert loop.train(config, tmp_path)["step"] == 2
    assert caplog.text.count("crops of the same images differ slightly") == 1
