"""Odd values for every command, `odd_values.txt`: each ends with a sentence that names what is wrong, writes nothing,
and takes no time.

A line is a command line, with {NAME} for a file of `odd_files` or a character of `CHARACTERS`. The sentence names the
last word of it, a flag or a field without its value; or what stands behind '=>'.
"""

import contextlib
import logging
import os
import pathlib
import re
import shlex
import shutil
import signal
import time

import pytest

from tests.waiting import PATIENCE
from vit_jax.commands import main


def command_of(line: str) -> str:
    name = shlex.split(line)[0]
    return name if name in main.COMMANDS else "vit_jax"


LINES = pathlib.Path(__file__).with_name("odd_values.txt").read_text().splitlines()
CASES = [line.partition("  => ")[::2] for line in LINES if line and line[0] != "#"]
COMMANDS = {  # 'vit_jax' for what is none
    name: [case for case in CASES if command_of(case[0]) == name]
    for name in ("vit_jax", *main.COMMANDS)
}
CHARACTERS = {"esc": "\x1b", "bell": "\x07", "newline": "\n", "rtl": "\u202e"}
MOST_SECONDS = 5  # of the processor: nothing is compiled or loaded


class Hangs(BaseException):
    """A command takes too long."""


@pytest.fixture(scope="module")
def odd_files(shared_data, tmp_path_factory) -> dict[str, str]:
    """Files and folders by the names that lines have for them; `tmp` has them all."""
    tmp = tmp_path_factory.mktemp("odd")
    photos = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:12]
    photo, model = tmp / "photo.jpg", tmp / "model.npz"
    shutil.copy(photos[0], photo)
    shutil.copyfile(shared_data / "oracle" / "vt_vit_testing.ckpt.npz", model)
    whole = photo.read_bytes()
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    contents = {
        "cutphoto.jpg": whole[:2000],
        "cut.npz": model.read_bytes()[:20_000],
        "cut.safetensors": (10**6).to_bytes(8, "little") + b"{}",
        "cut.tar": (shared_data / "cifar10_small_jpeg.tar").read_bytes()[:1000],
        "zero.npz": b"",
        "pickle.pt": b"\x80\x02c__main__\nX\n.",
        "text.txt": b"hello\n",
        "csv.csv": b"a;b\n1;2\n",
        "list.csv": b"path,label\nnosuch.jpg,cat\n",
        "jsonl.jsonl": b'{"path": 3}\n',
        "broken.py": b"def get_config(:\n",
        "nul.py": b"\0\0\0",
        **{f"flat/{number}.jpg": path.read_bytes() for number, path in enumerate(photos[:3])},
        **{f"flat30/{number}.jpg": path.read_bytes() for number, path in enumerate(photos)},
        **{f"folder/{path.name}": path.read_bytes() for path in photos[:3]},
        **{f"heic/{label}/{i}.heic": heic for label in "ab" for i in range(6)},
        **{f"cutimages/{label}/{i}.jpg": whole[:2000] for label in "ab" for i in range(6)},
        **{f"good/{label}/{i}.jpg": whole for label in "ab" for i in range(6)},
    }
    for name, content in contents.items():
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / name).write_bytes(content)
    (tmp / "empty").mkdir()
    os.mkfifo(tmp / "pipe")
    named = {path.name.partition(".")[0]: path for path in tmp.iterdir() if path.name[:4] != "cut."}
    named |= {"cut": tmp / "cut.npz", "cuttar": tmp / "cut.tar"}
    named |= {"safetensors": tmp / "cut.safetensors", "tmp": tmp, "long": tmp / ("x" * 300)}
    return CHARACTERS | {name: str(path) for name, path in named.items()}


@contextlib.contextmanager
def limited():
    """Raises `Hangs` after `PATIENCE` seconds."""

    def stop(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fill(text: str, files: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: files[match[1]], text)


def what_is_wrong(command, words: list[str], named: str) -> str:
    """What is wrong with the end of a command; '' if nothing is."""
    began = time.process_time()
    try:
        with limited():
            code, _, err = command(*words)
    except Hangs:
        return f"hangs for {PATIENCE} s"
    except Exception as error:
        return f"a traceback: {type(error).__name__}: {error}"
    seconds = time.process_time() - began
    sentence = f"\n{err}".partition("\nvit_jax: ")[2]
    if code not in (1, 2) or not sentence:
        return f"ends with {code}: {err[-500:]}"
    if re.search(r"[\0-\x08\x0b-\x1f\x7f\u202e]", err):
        return f"characters that control a terminal: {err!r}"
    if named not in sentence:
        return f"does not name {named!r}: {sentence}"
    return f"takes {seconds:.1f} s" if seconds > MOST_SECONDS else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_an_odd_value_ends_with_a_sentence_that_names_it(name, command, odd_files, monkeypatch):
    tmp = pathlib.Path(odd_files["tmp"])
    before = sorted(tmp.rglob("*"))
    monkeypatch.chdir(tmp / "empty")
    # The log's handler has the standard error of the test before, which is closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    problems = []
    for line, named in COMMANDS[name]:
        words = [fill(word, odd_files) for word in shlex.split(line)]
        named = named or words[-1].partition("=")[0].removeprefix("--").removeprefix("config.")
        if wrong := what_is_wrong(command, words, fill(named, odd_files)):
            problems.append(f"{line}\n    {wrong}")
    assert not problems, "\n".join(["", *problems])
    assert sorted(tmp.rglob("*")) == before


def test_there_are_300_odd_values_of_all_commands():
    assert len(set(CASES)) == len(CASES) >= 300 and all(COMMANDS.values())
