"""Gets files of public implementations that the tests run, at pinned commits, from GitHub.

    python tools/fetch/get_public_code.py       # prints .cache/public-code

They keep their own licenses. Nothing of them is installed or becomes part of this project.
"""

from __future__ import annotations

import argparse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from _fetch import FetchError, check_sha256, is_complete, log, new_folder, run_tool


@dataclass(frozen=True)
class Source:
    """A repository at a commit. `files` maps the local path to the path there and the sha256 of the
    content."""

    repository: str
    commit: str
    files: dict[str, tuple[str, str]]


AUTHORS = "ByteDance-Seed/In-Place-TTT"
SOURCES = (
    Source(
        AUTHORS,
        "be2324829b0e91c8fd10a74d4b43714fde6676e1",
        {
            f"in-place-ttt/{path}": (path, sha256)
            for path, sha256 in {
                "hf_models/hf_qwen3/modeling_qwen3.py": "a26d64cf85c985c4825a66d64815baa5956a2739593aad1969e9cc09d937a1d1",
                "hf_models/hf_llama/modeling_llama.py": "fb1e471283cc18fcd03fda5e2812c5e629c0c3ac1e592aa3b72783c42955be14",
                "inference_model/hf_qwen3/modeling_qwen3.py": "98ec94bcf1780635d7817b993a0bf4fa1f1a7e3a35415dce8a46c345a52a2858",
                "inference_model/hf_llama3/modeling_llama.py": "78e95c6cc3a64d4fc629ca6a9abb135883d1c0a6ca5184a2a0b8283f06802d85",
            }.items()
        },
    ),
    Source(
        "a1600012888/LaCT",
        "1f84d479fee89e34c58d74a0cf399c2b70564845",
        {
            "lact/ttt_operation.py": (
                "lact_llm/lact_model/ttt_operation.py",
                "ad9ee9bd98f3b73289291288b508c67e8049613c55ec3cc804ec94069db08a62",
            )
        },
    ),
    Source(
        "test-time-training/ttt-lm-pytorch",
        "cd831db10c8c9a0f6340f02da5613316a8a92b67",
        {"ttt/ttt.py": ("ttt.py", "5386ca299328e0d6ffe7b783b09a462023b02b9a0906cba01d83f482ed5b7484")},
    ),
    Source(
        "AlufRon/moshi_in_place",
        "d2e94758115e63793bd12c8e4149c837895fc2f8",
        {
            "moshi-in-place/ttt_module.py": (
                "moshi/moshi/moshi/modules/ttt_module.py",
                "1f1481dfd8fdf3bbe7b3d3bc4f685fc69ff5d11c978aafa2a1340ad823d039e6",
            )
        },
    ),
)


def get_public_code(out: Path) -> Path:
    """Write the files to ``out`` unless they are there already, and return ``out``."""
    made_from = [sha256 for source in SOURCES for _, sha256 in source.files.values()]
    if is_complete(out, made_from):
        log(f"{out} is complete")
        return out
    with new_folder(out, made_from) as folder:
        for source in SOURCES:
            for name, (path, sha256) in source.files.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(check_sha256(_read(source, path), sha256, f"{path} of {source.repository}"))
    log(f"wrote {out}")
    return out


def _read(source: Source, path: str) -> bytes:
    url = f"https://raw.githubusercontent.com/{source.repository}/{source.commit}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return bytes(response.read())
    except OSError as error:
        raise FetchError(f"cannot read {url} ({error}); check the network and run again") from error


def main() -> Path:
    """Read the command line and get the files."""
    parser = argparse.ArgumentParser(description="Get the public implementations' files that tests run.")
    parser.add_argument(
        "--out", type=Path, default=Path(".cache/public-code"), help="folder (default: %(default)s)"
    )
    return get_public_code(parser.parse_args().out)


if __name__ == "__main__":
    run_tool(main)
