"""Which model a session belongs to: its weights and what was measured for it, in memory as in its folder."""

import hashlib
from pathlib import Path

import torch
from models import COMPACT, converted

from inplace_ttt import load
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.checkpoint.folder_fingerprint import fingerprint_in
from inplace_ttt.surgery import fast_weights


def test_the_fingerprint_is_of_what_was_measured_too(tmp_path: Path) -> None:
    model = converted("llama", **COMPACT)
    first = fingerprint_of(model)
    model.save_pretrained(tmp_path)
    assert fingerprint_in(tmp_path) == first == fingerprint_of(load(tmp_path))
    measured = dict(fast_weights(model)[2].ttt.named_buffers())
    assert sorted(measured) == ["gain", "keys.bias", "keys.directions", "mean"]
    for buffer in measured.values():
        buffer.view(-1)[0] += 1
        assert fingerprint_of(model) != first
        first = fingerprint_of(model)


def test_the_fingerprint_of_what_measured_nothing_stays() -> None:
    """Sessions name it."""
    model = converted("llama")
    values = [p.detach().reshape(-1) for layer in fast_weights(model).values() for p in layer.parameters()]
    pieces = [p.detach().reshape(-1)[:1024] for p in model.parameters()]
    digest = hashlib.sha256(b"".join(p.bfloat16().view(torch.uint8).numpy().tobytes() for p in (*values, *pieces)))
    assert fingerprint_of(model) == digest.hexdigest()
