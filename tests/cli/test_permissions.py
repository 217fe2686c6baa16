"""What an ordinary user may not read or write is one sentence, never the last net, and leaves nothing
behind."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import fuzz_world as worlds
from .fuzz_run import Outcome, run

NOBODY = 65534
_READ = "--prompt-file text.txt --max-new-tokens 0"
WARM = (
    "info ttt",
    f"generate ttt {_READ} --save-state warm",
    "evaluate ttt --text text.txt other.txt --tokens 40",
    "convert base warm-out --layers 0 --chunk-size 8",
)
"""Run before the user changes, so that every library is imported: an ordinary user may not see where this
Python lies."""


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="inplace-ttt-"))
    folder.chmod(0o755)
    world = worlds.make_world(folder / "world")
    for command in WARM:
        assert (
            run(
                worlds.in_folder(
                    world, [str(world / w) if w.startswith("warm") else w for w in command.split()]
                ),
                world,
            ).code
            == 0
        )
    for name in ("base", "ttt"):
        shutil.copytree(world / name, world / f"closed-{name}")
        (world / f"closed-{name}").chmod(0o700)
        shutil.copytree(world / name, world / f"secret-{name}")
        (world / f"secret-{name}" / "config.json").chmod(0o600)
        shutil.copytree(world / name, world / f"hidden-{name}")
        for shard in (world / f"hidden-{name}").glob("*.safetensors"):
            shard.unlink()
            shutil.copyfile(world / name / shard.name, shard)  # not the link, which the open one shares
            shard.chmod(0o600)
    (world / "closed.txt").write_text("a text")
    (world / "closed.txt").chmod(0o600)
    (world / "closed.state").write_bytes((world / "state").read_bytes())
    (world / "closed.state").chmod(0o600)
    (world / "closed").mkdir(mode=0o700)
    (world / "ro").mkdir(mode=0o755)
    (world / "mine").mkdir()
    os.chown(world / "mine", NOBODY, NOBODY)
    yield world
    shutil.rmtree(folder)


COMMANDS = [
    *(f"info {kind}-ttt" for kind in ("closed", "secret", "hidden")),
    *(f"generate {kind}-ttt {_READ} --save-state mine/s" for kind in ("closed", "secret", "hidden")),
    *(
        f"convert {kind}-base mine/out --layers 0 --chunk-size 8 --no-verify"
        for kind in ("closed", "secret", "hidden")
    ),
    "convert base ro/out --layers 0 --chunk-size 8 --no-verify",
    "convert base closed/out --layers 0 --chunk-size 8 --no-verify",
    "convert base mine/none/../../ro/out --layers 0 --chunk-size 8 --no-verify",
    "convert base closed/deeper/out --layers 0 --chunk-size 8 --no-verify --adapter-only",
    "export closed-ttt mine/out --format adapter",
    "export ttt ro/out --format reference",
    "export secret-ttt mine/out --format reference",
    "export ttt mine/out --format lora --session closed.state",
    "export ttt ro/out --format plain --session state",
    "import-reference closed mine/out",
    "audit ttt --out ro/report.md",
    "audit ttt --out closed/report.md",
    "audit closed-ttt",
    f"generate ttt {_READ} --save-state ro/s",
    f"generate ttt {_READ} --save-state closed/s",
    f"generate ttt {_READ} --save-state none/../../s",
    f"generate ttt {_READ} --save-state none/s",
    f"generate ttt {_READ} --load-state closed.state --save-state mine/s",
    "generate ttt --prompt-file closed.txt",
    "chat ttt --session closed.state",
    "chat ttt --session ro/s",
    "chat ttt --read closed.txt",
    "generate ttt --prompt-file closed/text.txt",
    "evaluate ttt --text closed.txt text.txt",
    "evaluate ttt --text closed",
    "evaluate ttt --text text.txt other.txt --tokens 40 --out ro/e",
    "evaluate ttt --text text.txt other.txt --tokens 40 --cache ro/cache",
    "evaluate ttt --text text.txt other.txt --tokens 40 --cache closed/cache",
    "diagnose ttt --text text.txt --tokens 40 --out closed/d",
    "diagnose ttt --text closed.txt --tokens 40 --out mine/d",
    "evaluate base --lengths 512 --samples 1 --tasks ruler_vt --write-samples ro/s",
    "evaluate ttt --lengths 512 --samples 1 --tasks ruler_vt --out ro/r",
    "plan closed/recipe.yaml",
    "train closed/recipe.yaml",
    "train recipe.yaml --set output=ro/run",
    "train recipe.yaml --set output=ro",
    "train recipe.yaml --set output=closed/run",
    "train recipe.yaml --set output=none/../../run",
]


def as_nobody(arguments: list[str], folder: Path) -> Outcome:
    """The outcome of a command in a process of an ordinary user, which goes where it stands."""
    if os.geteuid() != 0:
        return run(arguments, folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.environ["HOME"] = str(folder / "mine")
            os.write(writer, pickle.dumps(run(arguments, folder)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as held:
        outcome = pickle.loads(held.read())
    os.waitpid(child, 0)
    return outcome


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_user_may_not_do_is_one_sentence(world: Path, command: str) -> None:
    paths = ("mine", "ro", "closed", "none", "secret", "hidden", "output=")
    words = command.split()
    arguments = [
        f"output={world / word.removeprefix('output=')}"
        if word.startswith("output=")
        else str(world / word)
        if word.startswith(paths)
        else word
        for word in words
    ]
    arguments = worlds.in_folder(world, arguments)
    before = sorted(world.rglob("*"))
    outcome = as_nobody(arguments, world)
    assert outcome.code == 2 and outcome.problem(arguments) is None, (
        outcome.problem(arguments),
        outcome.err,
        outcome.escaped,
    )
    assert sorted(world.rglob("*")) == before
