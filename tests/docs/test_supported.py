"""docs/supported.md is true: each cell about one process is tried on a tiny model, with each preset of its
column."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from families import build
from models import CHUNK, LAYERS, converted, distance, gradients, logits, random_ids, turn_writer_on
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, Session, calibrate, convert, disable_ttt
from inplace_ttt.attention_window import attention_window
from inplace_ttt.config import PRESETS, KeyWhitening
from inplace_ttt.surgery import config_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported.md"
IDS = random_ids(1, 40)
OWN = {"ridge": {"whitening": KeyWhitening(8), "eta": 10.0}}
"""Settings of the presets that fit a tiny model."""


def settings(preset: str) -> dict[str, Any]:
    values = {"eta": 0.3, **OWN.get(preset, {}), "layers": LAYERS, "chunk_size": CHUNK}
    return InPlaceTTTConfig.preset(preset, **values).to_dict()


def model_of(preset: str) -> PreTrainedModel:
    return converted("llama", **settings(preset))


def off(model: PreTrainedModel, **given: Any) -> Tensor:
    with disable_ttt(model):
        return logits(model, IDS, **given)


def _is(error: Exception, message: str) -> None:
    assert re.search(message, str(error)), error


def lora(preset: str, folder: Path) -> str:
    model = model_of(preset)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["ttt"]))
    found = gradients(adapted, adapted.train()(input_ids=IDS, labels=IDS, use_cache=False).loss)
    assert any("lora_B" in name for name in found)
    adapted.eval()
    before = logits(adapted, IDS)
    merged = adapted.merge_and_unload()
    assert distance(logits(merged, IDS), before) < 5e-5 < distance(off(merged), before)
    return "yes"


def packed_rows(preset: str, folder: Path) -> str:
    model, positions = model_of(preset), torch.cat([torch.arange(17), torch.arange(23)])[None]
    alone = torch.cat([logits(model, document) for document in IDS.split([17, 23], 1)], 1)
    assert distance(logits(model, IDS, position_ids=positions), alone) < 5e-5
    assert distance(off(model, position_ids=positions), alone) > 1e-3
    return "yes"


def gradient_checkpointing(preset: str, folder: Path) -> str:
    def found(*, recomputed: bool) -> dict[str, Tensor]:
        model = model_of(preset).train()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return gradients(model, model(input_ids=IDS, labels=IDS, use_cache=False).loss)

    kept, recomputed = found(recomputed=False), found(recomputed=True)
    assert kept.keys() == recomputed.keys()
    assert all(torch.allclose(recomputed[name], kept[name], atol=1e-6) for name in kept)
    return "yes"


def compiled(preset: str, folder: Path) -> str:
    model = model_of(preset).requires_grad_(False)

    def agrees(*, fullgraph: bool) -> bool:
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=fullgraph, backend="eager")
        with torch.no_grad():
            return distance(run(input_ids=IDS, use_cache=False).logits, logits(model, IDS)) < 1e-5

    try:
        assert agrees(fullgraph=True)
    except torch._dynamo.exc.Unsupported:
        assert agrees(fullgraph=False)
        return "in part"
    return "yes"


def saved_sessions(preset: str, folder: Path) -> str:
    session, answer = Session(model_of(preset)), "yes"
    session.read(IDS)
    try:
        session.save(folder / "session")
    except InPlaceTTTError as error:
        _is(error, "this session's prompt is not written yet")
        session, answer = Session(session.model), "in part"
        session.write_prompt(IDS)
        session.save(folder / "session")
    assert session.chunks_written > 0
    given = {"max_new_tokens": 9, "do_sample": False}
    again = Session.load(folder / "session", session.model)
    assert torch.equal(again.generate(IDS[:, :3], **given), session.generate(IDS[:, :3], **given))
    return answer


def beams(preset: str, folder: Path) -> str:
    model, ids = model_of(preset), random_ids(2, 30)

    def found(ids: Tensor) -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, num_beams=3,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip

    both = found(ids)
    for row, sequence in zip(ids, both.sequences, strict=True):
        alone = found(row[None]).sequences[0]
        assert torch.equal(alone, sequence[: len(alone)])
    with disable_ttt(model):
        changed = distance(both.sequences_scores, found(ids).sequences_scores) > 1e-5
    return "yes" if changed else "in part"


def window(preset: str, folder: Path) -> str:
    model = model_of(preset)
    with attention_window(model, 12):
        assert distance(logits(model, IDS), off(model)) > 1e-3
        session = Session(model)
        (session.write_prompt if preset == "ttt_ntp" else session.read)(IDS)
    assert session.chunks_written > 0
    return "yes"


def quantized(preset: str, folder: Path) -> str:
    """Both widths; a folder that is quantized while it loads."""
    base = build("llama", hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=400)
    model = convert(base, InPlaceTTTConfig(**settings(preset)))
    if config_of(model).needs_calibration:
        calibrate(model, [random_ids(1, 64, seed=2)])
    turn_writer_on(model)
    model.save_pretrained(folder)
    answers = []
    for bits in (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        BitsAndBytesConfig(load_in_8bit=True),
    ):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=bits, dtype=torch.float32, device_map="cpu"
        )
        try:
            found = logits(loaded, IDS)
            assert distance(off(loaded), found) > 1e-3
            session = Session(loaded)
            session.read(IDS)
            assert session.chunks_written > 0
            answers.append("yes")
        except InPlaceTTTError as error:
            _is(error, "load W0 as a plain linear map, not quantized|bitsandbytes packs 4-bit weights")
            answers.append("refused")
    if config_of(model).target == "gradient":
        packs = getattr(bitsandbytes.nn.Linear4bit(8, 8), "support_avx512bf16_for_cpu", False)
        assert answers == ["refused" if packs else "yes", "yes"]
        return "in part"
    assert len(set(answers)) == 1
    return answers[0]


def tensor_parallelism(preset: str, folder: Path) -> str:
    return "refused" if PRESETS[preset].wanting_whole_input else "yes"


TRIED: dict[str, Callable[[str, Path], str]] = {
    "LoRA": lora,
    "packed rows": packed_rows,
    "gradient checkpointing": gradient_checkpointing,
    "torch.compile": compiled,
    "sessions, saved and loaded": saved_sessions,
    "beams": beams,
    "attention window": window,
    "base in 4 or 8 bits": quantized,
    "tensor parallelism": tensor_parallelism,
}
SLOW = {"torch.compile"}
"""Law L12 has its cases in the gate."""
ELSEWHERE = {"ZeRO 1 and 2", "ZeRO 3", "ranks that share rows", "`trainable: ttt`", "vLLM"}


def cells() -> dict[str, dict[str, str]]:
    """Feature -> preset -> the word of the page."""
    found: dict[str, dict[str, str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()
        )
        for feature, *words in rows:
            found[feature] = {
                preset: word
                for column, word in zip(head[1:], words, strict=True)
                for preset in re.findall(r"`(\w+)`", column)
            }
    return found


def test_the_page_has_every_preset_and_feature() -> None:
    found = cells()
    assert found.keys() == TRIED.keys() | ELSEWHERE
    for feature, words in found.items():
        assert words.keys() == PRESETS.keys(), feature
        assert set(words.values()) <= {"yes", "in part", "refused", "no"}, feature


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "feature",
    [pytest.param(feature, marks=pytest.mark.full) if feature in SLOW else feature for feature in TRIED],
)
def test_a_cell(feature: str, preset: str, tmp_path: Path) -> None:
    assert TRIED[feature](preset, tmp_path) == cells()[feature][preset]
