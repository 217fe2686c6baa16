"""What a session's file must be: whole, undamaged, and of this model; whatever else is refused with the
reason."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CHUNK, converted, random_ids
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTError, Session

LAYERS = (0, 2)  # of the tiny models


@pytest.fixture(scope="module")
def windowed() -> PreTrainedModel:
    return converted("gemma3")


def saved(model: PreTrainedModel, path: Path, length: int = 3 * CHUNK + 1) -> Path:
    state = Session(model)
    state.read(random_ids(2, length))
    state.save(path)
    return path


def parts(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["session"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def old(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """As the first format wrote it, which has no checksum."""
    values = {**header, "format": "inplace-ttt-state/1"}
    values.pop("checksum", None)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"session": json.dumps(values)}
    )
    return path


def test_a_session_of_the_first_format_goes_on(llama: PreTrainedModel, tmp_path: Path) -> None:
    new = saved(llama, tmp_path / "new")
    loaded, was = (Session.load(path, llama) for path in (old(tmp_path / "old", *parts(new)), new))
    answers = [
        state.generate(random_ids(2, 3), max_new_tokens=4, do_sample=False, eos_token_id=-1)
        for state in (loaded, was)
    ]
    assert torch.equal(*answers)


def test_every_flipped_bit_is_noticed(llama: PreTrainedModel, tmp_path: Path) -> None:
    whole = saved(llama, tmp_path / "whole").read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    places = [*range(0, start, 97), *range(start, len(whole), len(whole) // 60), len(whole) - 1]
    for place in places:
        for bit in (1, 128):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            (tmp_path / "damaged").write_bytes(damaged)
            with pytest.raises(InPlaceTTTError) as refusal:
                Session.load(tmp_path / "damaged", llama)
            assert "\n" not in str(refusal.value), (place, bit)


def edit(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], object]:
    return lambda header, tensors: tensors.update({name: change(tensors[name])})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


WRONG: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]]] = {
    "no state": ("0.fast.state is missing", lambda h, t: t.pop("0.fast.state")),
    "no counts": ("0.fast.counts is missing", lambda h, t: t.pop("0.fast.counts")),
    "no open chunk": ("0.fast.z is missing", lambda h, t: t.pop("0.fast.z")),
    "no keys": ("1.keys is missing", lambda h, t: t.pop("1.keys")),
    "a layer without fast weight": ("the fast weight of layer 2 is missing", lambda h, t: [t.pop(n) for n in list(t) if "2.f" in n]),
    "another layer's": ("'1.fast.state', which no session", lambda h, t: t.update({"1.fast.state": t.pop("0.fast.state")})),
    "a stranger": ("'x', which no session", lambda h, t: t.update(x=torch.zeros(2))),
    "a transposed state": ("instead of [2, ", edit("0.fast.state", lambda s: s.mT)),
    "one row": ("instead of", edit("0.fast.state", lambda s: s[:1])),
    "a half state": ("is torch.float16 instead of torch.float32", edit("0.fast.state", lambda s: s.half())),
    "a state of bytes": ("instead of torch.float32", edit("0.fast.state", lambda s: s.to(torch.uint8))),
    "NaN in the state": ("0.fast.state holds numbers that are not finite", edit("0.fast.state", with_nan)),
    "NaN in the keys": ("1.keys holds numbers that are not finite", edit("1.keys", with_nan)),
    "infinity": ("not finite", edit("0.fast.x", lambda x: x / 0)),
    "keys of other heads": ("1.keys is", edit("1.keys", lambda k: k[:, :1])),
    "keys cut off": ("1.keys is", edit("1.keys", lambda k: k[:, :, 1:])),
    "whole numbers as keys": ("a floating dtype", edit("1.keys", lambda k: k.int())),
    "negative counts": ("out of range", edit("0.fast.counts", lambda c: -c)),
    "a full open chunk": ("out of range", edit("0.fast.counts", lambda c: c + CHUNK)),
    "counts of floats": ("instead of torch.int64", edit("0.fast.counts", lambda c: c.float())),
    "tokens beyond the vocabulary": ("token ids that are not below", edit("tokens", lambda t: t + 10**6)),
    "negative tokens": ("token ids", edit("tokens", lambda t: -t - 1)),
    "tokens of floats": ("tokens is torch.float32", edit("tokens", lambda t: t.float())),
    "fewer tokens": ("KV cache has read", edit("tokens", lambda t: t[:, :3])),
    "another length": ("different numbers of tokens", lambda h, t: h["attention"]["1"].update(length=7)),
    "a window": ("layer 0 has a window of 5", lambda h, t: h["attention"]["0"].update(window=5)),
    "a layer too many": ("KV cache belongs to layers", lambda h, t: h["attention"].update({"7": {"length": 25, "window": None}})),
    "a layer too few": ("not a session of this model", lambda h, t: h["attention"].pop("1")),
    "a layer by name": ("KV cache belongs to layers", lambda h, t: h["attention"].update({"x": {"length": 25}})),
    "a length of text": ("attention.0.length: must be a whole number", lambda h, t: h["attention"]["0"].update(length="many")),
    "attention as a list": ("must be a table", lambda h, t: h.update(attention=[1])),
    "no attention": ("attention: this setting is missing", lambda h, t: h.pop("attention")),
    "no fingerprint": ("fingerprint: this setting is missing", lambda h, t: h.pop("fingerprint")),
    "a fingerprint of numbers": ("fingerprint: must be text", lambda h, t: h.update(fingerprint=3)),
    "a config of text": ("config: must be a table", lambda h, t: h.update(config="paper")),
    "an unknown entry": ("unknown setting", lambda h, t: h.update(more=1)),
    "nothing": ("KV cache", lambda h, t: t.clear()),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_no_session_of_this_model_holds_is_refused(
    kind: str, llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Without a checksum too: what is wrong is said."""
    says, change = WRONG[kind]
    header, tensors = parts(saved(llama, tmp_path / "whole"))
    change(header, tensors)
    with pytest.raises(InPlaceTTTError) as refusal:
        Session.load(old(tmp_path / "wrong", header, tensors), llama)
    assert says in str(refusal.value) or (kind == "nothing" and "missing" in str(refusal.value)), str(
        refusal.value
    )
    assert "\n" not in str(refusal.value)


def test_a_window_is_the_models_own(windowed: PreTrainedModel, tmp_path: Path) -> None:
    header, tensors = parts(saved(windowed, tmp_path / "whole"))
    sliding = next(index for index, kept in header["attention"].items() if kept["window"])
    Session.load(old(tmp_path / "old", header, tensors), windowed)
    header["attention"][sliding]["window"] += 1
    with pytest.raises(InPlaceTTTError, match=f"layer {sliding} has a window of"):
        Session.load(old(tmp_path / "wrong", header, tensors), windowed)


def test_a_state_is_no_device(llama: PreTrainedModel) -> None:
    state = Session(llama)
    state.read(random_ids(1, 9))
    with pytest.raises(InPlaceTTTError, match="cannot write /dev/null: it is a device, not a file"):
        state.save("/dev/null")
    assert Path("/dev/null").is_char_device()
