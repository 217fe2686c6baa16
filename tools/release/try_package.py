"""Installs the built package in an empty environment, and runs the README from another folder.

    python tools/release/try_package.py --dist dist        # after `python -m build`; `make package` does both

The steps of each installer are torch, the wheel, `inplace-ttt --help`, the README's first python block, and
its block that begins with `inplace-ttt convert`. Then the source distribution replaces the wheel. Prints one
Markdown row per installer.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
INSTALLERS = {  # the commands that make an environment, and that install into it
    "pip": (
        ["{python}", "-m", "venv", "{env}"],
        ["{env}/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir"],
    ),
    "uv": (
        ["{python}", "-m", "uv", "venv", "--quiet", "--python", "{python}", "{env}"],
        ["{python}", "-m", "uv", "pip", "install", "--quiet", "--no-cache", "--python", "{env}/bin/python"],
    ),
}


def block(language: str, start: str) -> str:
    """Returns the README's block of this language with this beginning."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(rf"^```{language}\n({re.escape(start)}.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def only(dist: Path, pattern: str) -> str:
    found = list(dist.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{dist} holds {len(found)} files {pattern}, and one is needed; empty it and build again")
    return str(found[0].resolve())


def try_with(installer: str, dist: Path, torch: str, cache: Path) -> str:
    """Returns a row: the installer, and the seconds of each step. A failed step ends the program with its
    output."""
    wheel, source = only(dist, "*.whl"), only(dist, "*.tar.gz")
    with TemporaryDirectory() as temporary:
        env, work, seconds = Path(temporary, "env"), Path(temporary, "work"), []
        work.mkdir()
        (work / ".cache").symlink_to(cache.resolve())
        (work / "smollm2-135m").symlink_to(cache.resolve() / "smollm2-135m")
        (work / "docs").mkdir()
        (work / "docs" / "notes.txt").symlink_to(ROOT / "docs" / "notes.txt")
        play = (cache / "text" / "shakespeare" / "hamlet.txt").read_text(encoding="utf-8")
        (work / "book.txt").write_text(play[:12000], encoding="utf-8")
        outside = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        variables = outside | {"PATH": f"{env / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

        def run(*command: str) -> None:
            start = time.monotonic()
            done = subprocess.run(
                command,
                cwd=work,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{done.stdout}\n{installer}: `{command[-1].strip()}` exits with {done.returncode}")
            seconds.append(time.monotonic() - start)
            print(
                f"{installer}: {seconds[-1]:.0f} s: {command[-1].strip()}\n{done.stdout}",
                file=sys.stderr,
                flush=True,
            )

        make, install = (
            [part.format(python=sys.executable, env=env) for part in step] for step in INSTALLERS[installer]
        )
        run(*make)
        run(*install, torch)
        run(*install, wheel)
        run("inplace-ttt", "--help")
        run("python", "-c", block("python", "from transformers"))
        run("bash", "-euo", "pipefail", "-c", block("bash", "inplace-ttt convert"))
        run(*install, "--no-deps", "--force-reinstall" if installer == "pip" else "--reinstall", source)
        run("inplace-ttt", "--version")
        _, torch_s, wheel_s, help_s, lines_s, commands_s, source_s, _ = seconds
    steps = (torch_s, wheel_s, help_s, lines_s, commands_s, source_s)
    return f"| {installer} | {' | '.join(f'{s:.0f}' for s in steps)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dist", type=Path, default=Path("dist"), help="folder with one wheel and one source distribution"
    )
    parser.add_argument("--installer", nargs="+", choices=INSTALLERS, default=[*INSTALLERS])
    parser.add_argument(
        "--torch",
        default="torch",
        help="torch requirement, installed first (default: %(default)s, in the index's version)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".cache"),
        help="folder of the model and the texts from `make model text`",
    )
    args = parser.parse_args()
    rows = [try_with(installer, args.dist, args.torch, args.cache) for installer in args.installer]
    print(
        "| seconds | torch | wheel | `--help` | the README's lines | `convert`, `generate` three times | "
        "source distribution |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
