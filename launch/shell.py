"""Commands of other programs: shown as one would type them, run, asked."""

import shlex
import shutil
import subprocess
import sys

from vit_jax.base.errors import ConfigError, UserError


def text(words: list[str]) -> str:
    """A command as one would type it."""
    return shlex.join(words)


def run(words: list[str], *, dry_run: bool, text_in: str | None = None) -> None:
    """Shows a command and runs it; in a dry run shows it alone, on standard output.

    Raises:
      ConfigError: the program is not installed.
      UserError: it fails.
    """
    if dry_run:
        print(text(words), flush=True)
        return
    require(words[0])
    print(text(words), file=sys.stderr, flush=True)
    code = subprocess.run(words, input=text_in, text=True).returncode
    if code:
        raise UserError(f"{text(words[:4])} … ended with {code}")


def ask(words: list[str]) -> str | None:
    """What a command prints; `None` if it fails or its program is not installed."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def require(program: str) -> None:
    """Raises `ConfigError` unless a program is installed."""
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed, which this engine calls")


def warn(message: str) -> None:
    """A warning for the user, on standard error."""
    print(f"vit_jax launch: {message}", file=sys.stderr, flush=True)
