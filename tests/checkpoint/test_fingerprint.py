"""Which model a session belongs to: its weights and what was measured for it, in memory as in its folder."""

import hashlib
from pathlib import Path

import pytest
import torch
from models import NAMES, RIDGE, converted

from inplace_ttt import InPlaceTTTConfig, cli, convert, load, revert
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.checkpoint.folder_fingerprint import base_fingerprint_in, fingerprint_in
from inplace_ttt.surgery import fast_weights

from .folders import save_base


def test_the_fingerprint_is_of_what_was_measured_too(tmp_path: Path) -> None:
    model = converted("llama", **RIDGE)
    first = fingerprint_of(model)
    model.save_pretrained(tmp_path)
    assert fingerprint_in(tmp_path) == first == fingerprint_of(load(tmp_path))
    measured = dict(fast_weights(model)[2].ttt.named_buffers())
    assert sorted(measured) == ["gain", "keys.center", "keys.directions", "mean"]
    for buffer in measured.values():
        buffer.view(-1)[0] += 1
        assert fingerprint_of(model) != first
        first = fingerprint_of(model)


def test_the_fingerprint_of_what_measured_nothing_stays() -> None:
    """Sessions name it."""
    model = converted("llama")
    values = [p.detach().reshape(-1) for layer in fast_weights(model).values() for p in layer.parameters()]
    pieces = [p.detach().reshape(-1)[:1024] for p in model.parameters()]
    digest = hashlib.sha256(
        b"".join(p.bfloat16().view(torch.uint8).numpy().tobytes() for p in (*values, *pieces))
    )
    assert fingerprint_of(model) == digest.hexdigest()


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v3", "qwen2_moe"])
def test_a_base_and_its_conversions_stand_on_the_same_weights(name: str, tmp_path: Path) -> None:
    """Whatever form they are in and whoever wrote them; conv and P, which LoRA's adapters hold, are none of
    these."""
    base = save_base(tmp_path / "base", name)
    expected = base_fingerprint_in(base)
    model = converted(name, layers=(2,))
    revert(model).save_pretrained(tmp_path / "again")
    assert base_fingerprint_in(tmp_path / "again") == expected
    convert(model, InPlaceTTTConfig(layers=(2,)))
    model.save_pretrained(tmp_path / "saved")
    assert cli.main(["convert", str(base), str(tmp_path / "full"), "--layers", "2", "--no-verify"]) == 0
    assert cli.main(["export", str(tmp_path / "full"), str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    assert {base_fingerprint_in(tmp_path / form) for form in ("saved", "adapter", "full")} == {expected}
    norm = next(parameter for parameter in model.parameters() if parameter.ndim == 1)
    norm.data[0] += 1
    model.save_pretrained(tmp_path / "other")
    assert base_fingerprint_in(tmp_path / "other") != expected
