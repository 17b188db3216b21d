"""What TFDS must download first: what is wrong is said at once, without TensorFlow."""

import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.services.ports import free_port
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.data.options import Data
from vit_jax.data.preparation.download import _SECONDS, check_downloads, download
from vit_jax.data.preparation.prepare import prepare


def builder(name="toy", *urls, instructions=None):
    """What is asked of a TFDS builder; those need TensorFlow."""
    infos = {url: SimpleNamespace(checksum=None, filename=url.split("/")[-1]) for url in urls}
    return SimpleNamespace(name=name, url_infos=infos, MANUAL_DOWNLOAD_INSTRUCTIONS=instructions)


@pytest.fixture
def no_proxy(monkeypatch):
    for scheme in ("http", "https", "ftp", "all"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme.upper()}_PROXY", raising=False)


@pytest.fixture
def server():
    """A port on this machine that answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_imagenet_s_files_must_be_downloaded_by_hand_and_it_is_said_which_whence_and_where(
    tmp_path,
):
    manual = tmp_path / "manual"
    with pytest.raises(UserError) as raised:
        check_downloads(builder("imagenet2012", instructions="by hand"), tmp_path)
    assert str(raised.value) == (
        "'imagenet2012' must be downloaded by hand: register at https://image-net.org/download-images, put "
        f"ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar into {manual}, and start this command again"
    )
    manual.mkdir()
    (manual / "ILSVRC2012_img_val.tar").touch()  # TFDS would prepare half of it without a word
    with pytest.raises(UserError, match=r"put ILSVRC2012_img_train.tar into"):
        check_downloads(builder("imagenet2012", instructions="by hand"), tmp_path)
    (manual / "ILSVRC2012_img_train.tar").touch()
    url = "http://127.0.0.1:1/ILSVRC2012_img_train.tar"  # not downloaded: it is there
    check_downloads(builder("imagenet2012", url, instructions="by hand"), tmp_path)


def test_other_sets_by_hand_are_told_in_tfds_own_words(tmp_path):
    with pytest.raises(UserError) as raised:
        check_downloads(builder(instructions="\n  Unpack it\n  to manual_dir.\n"), tmp_path)
    assert str(raised.value).endswith("is empty. TFDS says how: Unpack it to manual_dir")
    assert f"by hand into {tmp_path}/manual" in str(raised.value)


def test_without_a_network_it_is_said_within_seconds(tmp_path, no_proxy):
    urls = (f"http://127.0.0.1:{free_port()}/a.zip", "https://no-such-host.invalid/b.zip")
    assert _SECONDS <= 5  # is waited for any of them
    with pytest.raises(
        UserError, match="127.0.0.1 cannot be reached .Connection refused"
    ) as raised:
        check_downloads(builder("toy", *urls), tmp_path / "downloads")
    assert f"copy {tmp_path}/toy from there" in str(raised.value)


def test_a_name_server_that_does_not_answer_is_not_waited_for(tmp_path, no_proxy, monkeypatch):
    asked = threading.Event()

    def hang(*_, **__):
        asked.wait(20)
        raise OSError

    monkeypatch.setattr("vit_jax.data.preparation.download._SECONDS", 0.1)
    monkeypatch.setattr(socket, "create_connection", hang)
    with pytest.raises(UserError, match="cannot be reached .no answer"):
        check_downloads(builder("toy", "https://x.org/a.zip"), tmp_path)
    asked.set()


def test_one_host_that_answers_is_enough_and_so_is_a_proxy(tmp_path, no_proxy, server, monkeypatch):
    urls = (f"http://127.0.0.1:{free_port()}/a.zip", f"http://localhost:{server}/b.zip")
    check_downloads(builder("toy", *urls), tmp_path)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server}")
    check_downloads(builder("toy", "https://no-such-host.invalid/a.zip"), tmp_path)


def test_what_was_downloaded_before_needs_no_network(tmp_path, no_proxy):
    from tensorflow_datasets.core.download import resource

    url = "https://no-such-host.invalid/a.zip"
    (tmp_path / resource.get_dl_fname(url, None)).touch()
    check_downloads(builder("toy", url), tmp_path)
    check_downloads(builder("toy"), tmp_path)


def test_names_that_nothing_can_prepare_are_refused_with_what_is_near(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("path,label\n")
    (tmp_path / "birds").mkdir()
    for source, words in (
        ("lables.csv", "there is no lables.csv; did you mean 'labels.csv'?"),
        ("./brids", "'./brids' does not exist; did you mean './birds'?"),
        ("birds/trian", "there is no birds/trian"),
        ("brids", "'brids' is no file, not prepared in .*; did you mean 'birds'?"),
        ("cifar11", "TFDS has no such data set; did you mean 'cifar10_1'?"),
        ("imagenet21k", "is not in TFDS. Download fall11_whole.tar"),
    ):
        with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
            prepare(source, str(tmp_path / "out"), data_dir=str(tmp_path / "tfds"))
    assert not (tmp_path / "out").exists()


def test_without_tensorflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install .*\[prepare\]"):
        download(Data(name="cifar10", path=str(tmp_path)))
