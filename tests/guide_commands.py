"""The commands of README.md and docs/*.md: the lines of their blocks, and what stands between backquotes."""

import pathlib
import re
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A note with commands that a guide had.
GUIDES.append(ROOT / "docs/notes/2026-11-26-segmentation.md")


def lines_of(guide: pathlib.Path):
    """(where, command) of the shell lines in blocks, continued ones joined, one for each && part."""
    fence, begun = None, ""
    for number, line in enumerate(guide.read_text().splitlines(), start=1):
        if line.startswith("```"):
            fence = None if fence is not None else line[3:]
            continue
        indented = fence is None and re.match(r"    (vit_jax|pip|python|bash|mkdir|tar) ", line)
        if not (fence == "bash" or indented or begun):
            continue
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        words, begun = shlex.split(begun, comments=True), ""
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield f"{guide.name}:{number}", words[:end]
            words = words[end + 1 :]


# In a shell without programs our command prints its words.
SHELL = """set -f
vit_jax() { printf '%s\\0' vit_jax "$@"; printf '\\n\\0'; }
"""


def shell_words(commands: str, folder: pathlib.Path) -> list[list[str]]:
    """The words of our commands as a shell splits them, which must understand all of the text."""
    checked = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
    assert checked.returncode == 0, (commands, checked.stderr)
    done = subprocess.run(
        [shutil.which("bash")], input=SHELL + commands, env={"PATH": ""}, cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    return [words.split("\0")[:-1] for words in done.stdout.split("\n\0")[:-1]]


def span_texts_of(guide: pathlib.Path):
    """(where, text) of what stands between backquotes and is a command of ours or a list of flags."""
    text = re.sub(
        r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), guide.read_text(), flags=re.M | re.S
    )
    for found in re.finditer(r"`((?:vit_jax|python|pytest|bash|--)[^`]*)`", text):
        number = text.count("\n", 0, found.start()) + 1
        if not re.search(r"…|\[|\*|^python tests/\S+$", found[1]) and not re.match(
            "vit_jax[.]", found[1]
        ):
            yield f"{guide.name}:{number}", found[1].replace("\n", " ")


def spans_of(guide: pathlib.Path):
    """`span_texts_of` with the words of the texts."""
    return [(where, shlex.split(text)) for where, text in span_texts_of(guide)]


def is_synopsis(words: list[str]) -> bool:
    """Whether a command stands for many: `--config=FILE[:ARGUMENT]`."""
    return any(re.search(r"…|\[-|=FILE\b|\[:", word) for word in words)


LINES = [(where, words) for guide in GUIDES for where, words in lines_of(guide)]
SPANS = [(where, words) for guide in GUIDES for where, words in spans_of(guide)]


def ours() -> dict[str, list[str]]:
    """Every command of vit_jax once, and what launch scripts are told to run, by its text."""
    found = []
    for _, words in [*LINES, *SPANS]:
        if "vit_jax" in words[:2]:
            found.append(words[words.index("vit_jax") + 1 :])
        elif "train" in words:
            found.append(words[words.index("train") :])
    return {
        " ".join(words): words
        for words in found
        if any(re.search(r"^--|[.]|^[A-Z]+$", word) for word in words[1:])
        and not is_synopsis(words)
    }
