"""Splits the texts in two, and keeps folders of runs, each with a record of its origin.

The evidence's tools share this module.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from memory_rules import ONE_PROCESS, ROOT, WORK
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.folders import new_folder
from inplace_ttt.files.manifest import CHECKPOINT

RECIPE = ROOT / "recipes" / "evidence" / "smollm2-memory-cpu.yaml"
TEXT = ROOT / ".cache" / "text"
TRAIN, HELD_OUT = WORK / "text" / "train", ("--text", str(WORK / "text" / "held-out"))
LONG_ENOUGH = 12_000
"""Bytes from which on a file surely has enough tokens."""


def split_texts() -> None:
    """Holds out every ninth long file.

    The two folders contain links, so that a recipe and the command line can name them.
    """
    files = sorted(TEXT.rglob("*.txt"))
    held = [file for file in files if file.stat().st_size > LONG_ENOUGH][4::9]
    folders = [WORK / "text" / name for name in ("train", "held-out")]
    wanted = {folders[file in held] / "-".join(file.relative_to(TEXT).parts): file for file in files}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for link in folder.iterdir():
            if link not in wanted or link.resolve() != wanted[link].resolve():  # a link of another split
                link.unlink()
    for link, file in wanted.items():
        if not link.is_symlink():
            link.symlink_to(file)


def digests(file: Path = RECIPE) -> dict[str, str]:
    """Returns the digests of the texts and of the recipe.

    The recipe's folders are left out, because the tools choose them, and so is its audit, which changes no result.
    """
    recipe = yaml.safe_load(file.read_text())
    for section, key in (("model", "path"), ("data", "train")):
        del recipe[section][key]
    del recipe["output"], recipe["audit"]
    texts = {
        f"{name}_sha256": _digest(WORK / "text" / folder)
        for name, folder in (("held_out", "held-out"), ("train", "train"))
    }
    return {**texts, "recipe_sha256": hashlib.sha256(json.dumps(recipe).encode()).hexdigest()}


@functools.cache
def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "").replace("%", "percent")


def stamp_of(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a folder, as `made_by` wrote it; None without one."""
    file = folder.with_name(f"{folder.name}.made-by.json")
    return json.loads(file.read_text()) if file.exists() else None


def made_by(folder: Path, **question: Any) -> None:
    """Writes the record of a folder beside it, before anything makes the folder.

    Raises:
        InPlaceTTTError: if the folder exists and its record differs.
    """
    asked, known = json.loads(json.dumps(question)), stamp_of(folder)
    if folder.exists() and known != asked:
        raise InPlaceTTTError(
            f"{folder} was made by another recipe, by other settings or from other texts; move it away."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_name(f"{folder.name}.made-by.json").write_text(json.dumps(asked, indent=1) + "\n")


def widen(source: Path | None, base: Path) -> None:
    """Copies a checkpoint in float32. A copy that exists is kept; without a source nothing happens."""
    if source is None or base.exists():
        return
    with new_folder(base, CHECKPOINT) as folder:
        AutoModelForCausalLM.from_pretrained(source, dtype="float32").save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def conversion(base: Path, *how: str) -> dict[str, Any]:
    """Returns the record of a converted folder. It names the training texts, since some conversions measure
    them."""
    return {"base": str(base), "how": how, "train_sha256": digests()["train_sha256"]}


def convert(base: Path, converted: Path, *how: str) -> Path:
    """Converts a base. A folder that exists is kept."""
    made_by(converted, **conversion(base, *how))
    if not converted.exists():
        command("convert", str(base), str(converted), *how)
    return converted


def train(converted: Path, run: Path, seed: int, *settings: str, recipe: Path = RECIPE) -> None:
    """Trains by the recipe on the texts that are not held out. A finished run is kept, and an unfinished one
    resumes."""
    same_in_any = [setting for setting in settings if setting not in ONE_PROCESS]
    made_by(run, model=stamp_of(converted), seed=seed, settings=same_in_any, **digests(recipe))
    if (run / "final").exists():
        return
    settings = (
        f"model.path={converted}",
        f"data.train={TRAIN}",
        f"output={run}",
        f"training.seed={seed}",
        *settings,
    )
    words = (word for s in (*settings, f"data.seed={seed}") for word in ("--set", s))
    timed(run / "train.seconds", "train", str(recipe), "--no-audit", *words)


def leave_untrained(converted: Path, run: Path) -> None:
    """Makes the folder of a run whose model is read as converted, without training."""
    made_by(run, converted=stamp_of(converted), **digests())
    run.mkdir(exist_ok=True)


def read(run: Path, model: Path, out: str, *how: str) -> None:
    """Evaluates a model on the held-out texts by `inplace-ttt evaluate`, into a folder of the run.

    A folder that exists is kept.
    """
    made_by(run / out, how=how)
    if not (run / out).exists():
        timed(run / f"{out}.seconds", "evaluate", str(model), *HELD_OUT, *how, "--out", str(run / out))


def timed(note: Path, *words: str) -> None:
    """Runs a command, and notes its seconds together with those of earlier, interrupted starts."""
    began, before = time.perf_counter(), int(note.read_text()) if note.exists() else 0
    try:
        command(*words)
    finally:
        if note.parent.exists():
            note.write_text(f"{before + time.perf_counter() - began:.0f}\n")


def seconds_of(run: Path) -> dict[str, int]:
    return {note.stem: int(note.read_text()) for note in sorted(run.glob("*.seconds"))}


def command(*words: str) -> None:
    print("inplace-ttt", *words, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "inplace_ttt.cli", *words], cwd=ROOT, stdout=sys.stderr)
    if done.returncode:
        sys.exit(
            f"`inplace-ttt {words[0]}` failed with exit code {done.returncode}; its message is above, and "
            "the same command resumes."
        )
