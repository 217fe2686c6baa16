"""A processor without instructions for half precision is named, with what is faster."""

import pytest
import torch

from inplace_ttt.ops import precision


def test_half_precision_without_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "emulated", lambda dtype: dtype == torch.bfloat16)
    note = precision.note_on_emulation(torch.bfloat16, 10**8, "give --dtype float32")
    assert note == (
        "this processor lacks instructions for bfloat16, and computes several times more slowly in it than in "
        "float32; give --dtype float32."
    )
    assert precision.note_on_emulation(torch.float16, 10**8, "") is None, "it has those"
    assert precision.note_on_emulation(torch.bfloat16, 10**5, "") is None, "nobody waits for a tiny model"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.note_on_emulation(torch.bfloat16, 10**8, "") is None


def test_float32_is_never_emulated() -> None:
    assert not precision.emulated(torch.float32) and isinstance(precision.emulated(torch.bfloat16), bool)
