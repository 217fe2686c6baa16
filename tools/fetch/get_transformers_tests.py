"""Gets the tests of every model from transformers' source distribution, in the installed version.

    python tools/fetch/get_transformers_tests.py       # prints .cache/transformers-tests

They are read out of the published archive, and nothing is installed. The wheel leaves the tests out.
"""

from __future__ import annotations

import argparse
import tarfile
from importlib.metadata import version
from pathlib import Path

from _fetch import Archive, fetch, is_complete, log, new_folder, run_tool

# transformers version -> its source distribution. Another version has other tests: add it here, and compare
# the results.
ARCHIVES = {
    "5.23.0": Archive(
        registry="PyPI",
        requirement="transformers==5.23.0",
        filename="transformers-5.23.0.tar.gz",
        sha256="19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
        megabytes=11,
    ),
    "5.24.0": Archive(
        registry="PyPI",
        requirement="transformers==5.24.0",
        filename="transformers-5.24.0.tar.gz",
        sha256="906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3",
        megabytes=11,
    ),
}
FILES = ("tests/test_modeling_common.py", "LICENSE")


def get_tests(out: Path) -> Path:
    """Write the tests to ``out`` unless they are there already, and return ``out``."""
    installed = version("transformers")
    archive = ARCHIVES.get(installed)
    if archive is None:
        log(
            f"transformers {installed} is installed, and its own tests are listed for {', '.join(ARCHIVES)} "
            "alone, so they do not run"
        )
        return out
    if is_complete(out, [archive.sha256]):
        log(f"{out} is complete")
        return out
    with new_folder(out, [archive.sha256]) as folder, tarfile.open(fetch(archive)) as tar:
        for name in FILES:
            (folder / Path(name).name).write_bytes(tar.extractfile(f"transformers-{installed}/{name}").read())
    log(f"wrote {out}")
    return out


def main() -> Path:
    """Read the command line and get the tests."""
    parser = argparse.ArgumentParser(description="Get transformers' own tests of a model.")
    parser.add_argument(
        "--out", type=Path, default=Path(".cache/transformers-tests"), help="folder (default: %(default)s)"
    )
    return get_tests(parser.parse_args().out)


if __name__ == "__main__":
    run_tool(main)
