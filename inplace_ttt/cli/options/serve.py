"""`inplace-ttt serve PATH`"""

from __future__ import annotations

import argparse

from ..arguments import path, whole

EXAMPLES = """examples:
  inplace-ttt serve ./smollm2-ttt --port 8000 --api-key secret
  inplace-ttt serve ./smollm2-ttt --api-key alice --api-key bob --memories /srv/memories
  inplace-ttt serve ./smollm2-ttt --vllm --max-num-seqs 16 --max-model-len 8192

then, a request that names a memory reads and writes it:
  curl localhost:8000/v1/completions -H 'Authorization: Bearer secret' -H 'Content-Type: application/json' \\
    -d '{"model": "./smollm2-ttt", "prompt": "The whale", "memory": "book", "freeze": true}'
  curl localhost:8000/v1/memories -H 'Authorization: Bearer secret'"""

_MOST = 2**50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen at (default: 127.0.0.1; 0.0.0.0 is all)",
    )
    parser.add_argument("--port", type=whole(1, 65535), default=8000, metavar="N", help="default: 8000")
    parser.add_argument(
        "--api-key",
        type=_key,
        action="append",
        default=[],
        metavar="K",
        help="who may ask, repeatable; memories belong to a key (default: anyone)",
    )
    parser.add_argument(
        "--memories",
        type=path,
        default="memories",
        metavar="DIR",
        help="where memories are saved (default: memories)",
    )
    parser.add_argument(
        "--per-key",
        type=whole(1, 10**6),
        default=64,
        metavar="N",
        help="most memories of one key (default: 64)",
    )
    parser.add_argument(
        "--memory-bytes",
        type=whole(1, _MOST),
        default=4 << 30,
        metavar="N",
        help="bytes of all memories that are not on disk; beyond, the least recently used go there "
        "(default: 4 GiB)",
    )
    parser.add_argument(
        "--vllm", nargs=argparse.REMAINDER, default=[], help="arguments for vLLM: all that follows"
    )


def _key(text: str) -> str:
    """vLLM would take an empty one, as of a variable that is not set, for none, and let everyone in."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "must not be empty, by which anyone would be let in; give a key, or leave it out"
        )
    return text
