"""Arguments of `inplace-ttt serve PATH`."""

from __future__ import annotations

import argparse

from ..arguments import path, whole

EXAMPLES = """examples:
  inplace-ttt serve ./smollm2-ttt --port 8000 --api-key secret
  inplace-ttt serve ./smollm2-ttt --api-key alice --api-key bob --memories /srv/memories
  inplace-ttt serve ./smollm2-ttt --vllm --max-num-seqs 16 --max-model-len 8192

then a request that names a memory reads and writes it:
  curl localhost:8000/v1/completions -H 'Authorization: Bearer secret' -H 'Content-Type: application/json' \\
    -d '{"model": "./smollm2-ttt", "prompt": "The whale", "memory": "book", "freeze": true}'
  curl localhost:8000/v1/memories -H 'Authorization: Bearer secret'"""

_MOST = 2**50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on (default: 127.0.0.1; 0.0.0.0 is all)",
    )
    parser.add_argument(
        "--port", type=whole(1, 65535), default=8000, metavar="PORT", help="port to listen on (default: 8000)"
    )
    parser.add_argument(
        "--api-key",
        type=_key,
        action="append",
        default=[],
        metavar="KEY",
        help="key of a user, repeatable; memories belong to a key (default: requests need no key)",
    )
    parser.add_argument(
        "--memories",
        type=path,
        default="memories",
        metavar="DIR",
        help="folder of saved memories (default: memories)",
    )
    parser.add_argument(
        "--per-key",
        type=whole(1, 10**6),
        default=64,
        metavar="N",
        help="most memories per key (default: 64)",
    )
    parser.add_argument(
        "--memory-bytes",
        type=whole(1, _MOST),
        default=4 << 30,
        metavar="N",
        help="bytes of memories kept in RAM; beyond it, the least recently used are moved to disk "
        "(default: 4 GiB)",
    )
    parser.add_argument(
        "--vllm", nargs=argparse.REMAINDER, default=[], help="all following arguments are passed to vLLM"
    )


def _key(text: str) -> str:
    """Parses an API key, which must not be empty.

    vLLM would take an empty key, such as an unset variable, for no key at all, and accept every request.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "must not be empty, because every request would then be accepted; give a key, or leave it out"
        )
    return text
