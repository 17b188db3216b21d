"""Lists of images as people's programs write them."""

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data

TEXT = "path,label\ncafé/1.png,Käse\n2.png,Brot\n"


def opened(path):
    return sources.open_source(Data(name="folder", path=str(path), holdout=0.0), "train")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_utf_8_and_utf_16_with_its_mark_are_read(encoding, tmp_path):
    (tmp_path / "a.csv").write_text(TEXT, encoding=encoding)
    source = opened(tmp_path / "a.csv")
    assert source.classes == ("Brot", "Käse") and source.paths == ("café/1.png", "2.png")
    (tmp_path / "classes.txt").write_text("Käse\nBrot\n", encoding=encoding)
    assert opened(tmp_path / "a.csv").labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("latin-1"), "line 2: the byte 0xe9 is not UTF-8; .*iconv -f WINDOWS-1252"),
        (TEXT.encode("utf-16")[:-1], "line 3: this is not UTF-16, though it begins like it"),
        ("path,label\n1.png,a\n".encode("utf-16-le"), "line 1: there is a NUL.*iconv -f UTF-16LE"),
        (b"path,label\n1.png,a\n2\0.png,b\n", "line 3: there is a NUL character"),
        (b"path,label\nhttps://x.org/1.png,a\n", "line 2: 'https://x.org/1.png' is a web address"),
        (
            b'path,label\n"1.png,a\n' + b"x" * 200_000,
            "a.csv, line .* field larger than field limit",
        ),
    ],
    ids=["latin-1", "half utf-16", "utf-16 without mark", "nul", "web", "open quote"],
)
def test_other_encodings_and_what_is_no_list_are_refused_with_the_line_and_the_remedy(
    content, words, tmp_path
):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=f"a.csv, {words}" if "a.csv" not in words else words):
        opened(tmp_path / "a.csv")


def test_class_names_and_json_lines_in_another_encoding_are_refused_too(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"path": "1.png", "label": "Käse"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="a.jsonl, line 1: the byte 0xe4 is not UTF-8"):
        opened(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("path,label\n1.png,0\n2.png,1\n")
    (tmp_path / "classes.txt").write_bytes("Käse\nBrot\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="classes.txt, line 1: the byte 0xe4 is not UTF-8"):
        opened(tmp_path / "a.csv")
