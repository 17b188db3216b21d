"""What shells complete of a command line, by the shells themselves."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys

import pytest

from tests.as_from_a_shell import AS_FROM_A_SHELL
from tests.waiting import PATIENCE
from vit_jax.commands.completion_command import SHELLS
from vit_jax.commands.main import COMMANDS

# How a shell starts without the settings of whoever runs the tests, and what comes before the script.
STARTED = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; "),
    "fish": (["fish", "--no-config", "-i"], ""),
}
TYPED = {
    "vit_jax tra": "vit_jax train",
    "vit_jax train --config=digits_": "vit_jax train --config=digits_finetune",
    "vit_jax train --config.optim.poly": "vit_jax train --config.optim.polynomial=",
    "vit_jax train --config.model.name=Mixer-S/1": "vit_jax train --config.model.name=Mixer-S/16",
    "vit_jax show photos/one": "vit_jax show photos/one.npz",
}
ALL = """
import os, sys
from vit_jax.commands.completion_command import complete
from vit_jax.commands.main import COMMANDS

for name in COMMANDS:
    if os.fork() == 0:
        words = list(complete(f"vit_jax {name}{' gke' * (name == 'launch')} --"))
        print(name, len(words), "jax" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vit_jax ex", ["exits", "export"]),
        ("vit_jax help ser", ["serve"]),
        ("vit_jax train --config=digits", ["--config=digits", "--config=digits_finetune"]),
        ("vit_jax train --config digits_", ["digits_finetune"]),
        ("vit_jax train --dr", ["--dry_run"]),
        ("vit_jax train --config.lo", ["--config.lora.", "--config.log."]),
        ("vit_jax train --config.log.t", ["--config.log.tensorboard="]),
        ("vit_jax train --config.log.tensorboard=", ["True", "False"]),
        ("vit_jax train --config.nonfinite=s", ["stop", "skip"]),
        ("vit_jax predict --config.data.eval_r", ["--config.data.eval_resize="]),
        ("vit_jax export --to=", ["onnx", "stablehlo"]),
        ("vit_jax models ViT-B/", ["ViT-B/32", "ViT-B/16", "ViT-B/8"]),
        ("vit_jax recipes copy experiments/pool", ["experiments/pooling"]),
        ("vit_jax launch s", ["skypilot", "slurm"]),
        ("vit_jax launch tpu_vm st", ["start", "status", "stop"]),
        ("vit_jax launch local --proc", ["--processes=", "--process_logs="]),
        ("vit_jax launch gke --name=a -- train --config=deit3", ["deit3", "deit3_i21k"]),
        ("vit_jax show ", []),
        ("vit_jax no_such ", []),
    ],
)
def test_a_line_is_completed_by_what_can_stand_there(command, line, words):
    code, out, err = command("completion", f"--line={line}")
    found = [answer.partition("\t")[0] for answer in out.splitlines()]
    assert code == 0 and not err
    assert found == words or found == [f"{line.split()[-1].partition('=')[0]}={w}" for w in words]


@pytest.mark.parametrize(
    "name",
    ["convert", "evaluate", "exits", "export", "inspect", "predict", "push", "serve", "show"],
)
def test_every_command_that_takes_a_checkpoint_takes_what_its_file_does_not_say(command, name):
    _, out, _ = command("completion", f"--line=vit_jax {name} --")
    offered = {line.partition("\t")[0] for line in out.splitlines()}
    assert {"--model=", "--classes=", "--ignore="} <= offered


def test_every_command_is_completed_without_jax():
    done = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, check=True)
    found = {
        name: (int(words) > 0, jax) for name, words, jax in map(str.split, done.stdout.splitlines())
    }
    assert found == dict.fromkeys(COMMANDS, (True, "False")) | {"completion": (False, "False")}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_what_is_typed(shell, tmp_path, command):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    code, script, _ = command("completion", shell)
    assert code == 0
    (tmp_path / "script").write_text(script)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.npz").touch()
    program = tmp_path / "vit_jax"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vit_jax "$@"\n')
    program.chmod(0o755)
    output = typed(shell, tmp_path, [f"{line}\t\x01echo '<\x05>'\n" for line in TYPED])
    found = [line.rstrip() for line in re.findall(r"^<(.*?)>\r?$", output, re.M)]
    assert found == list(TYPED.values()), output


def typed(shell: str, folder, lines: list[str]) -> str:
    """What a shell shows that runs in a terminal, in a folder with the script of completion and a program vit_jax, and
    in which these keys are pressed.
    """
    command, before = STARTED[shell]
    terminal, slave = pty.openpty()
    there = {"PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(folder)}
    process = subprocess.Popen(
        [*AS_FROM_A_SHELL, *command], stdin=slave, stdout=slave, stderr=slave, cwd=folder,
        env=os.environ | there, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    output = b""
    keys = iter([f"{before}source ./script; echo '<'READY'>'\n", *lines, "exit\n"])
    waits_for = 0
    os.write(terminal, next(keys).encode())
    while select.select([terminal], [], [], PATIENCE)[0]:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # the shell has ended
            break
        # One line after the other, as a person does.
        if len(re.findall(rb"^<.*?>\r?$", output, re.M)) > waits_for:
            waits_for += 1
            os.write(terminal, next(keys).encode())
    os.close(terminal)
    process.wait()
    return output.decode(errors="replace").partition("<READY>")[2]
