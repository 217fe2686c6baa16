"""The diagnosis of a real model: SmolLM2-135M on a State of the Union."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, cli, convert
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.diagnostics import Diagnosis, diagnose
from inplace_ttt.surgery import fast_weights
from inplace_ttt.texts.documents import documents_in, tokens_of

ROOT = Path(__file__).parents[2]
MODEL, TEXT = (
    ROOT / ".cache" / "smollm2-135m",
    ROOT / ".cache" / "text" / "sotu" / "1995_william_j_clinton_d.txt",
)
# bfloat16 is emulated on some processors
pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]
TOKENS = 264
"""Four chunks and a bit."""


def converted(*layers: int) -> PreTrainedModel:
    return convert(load_base(MODEL, dtype=torch.bfloat16), InPlaceTTTConfig(layers=layers, chunk_size=64))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    assert MODEL.exists() and TEXT.exists(), "run `make model text` first"
    return tokens_of(*documents_in([TEXT]), AutoTokenizer.from_pretrained(MODEL), TOKENS)


def ids_of(diagnosis: Diagnosis, severity: str) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.id, finding.layers) for finding in diagnosis.of(severity)}


def test_a_fresh_conversion_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_it = [
        "convert",
        MODEL,
        tmp_path / "ttt",
        "--layers",
        "12,18,24",
        "--chunk-size",
        "64",
        "--no-verify",
    ]
    assert cli.main([str(a) for a in convert_it]) == 0
    capsys.readouterr()
    diagnose_it = [
        "diagnose",
        tmp_path / "ttt",
        "--text",
        TEXT,
        "--tokens",
        TOKENS,
        "--out",
        tmp_path / "out",
        "--json",
    ]
    assert cli.main([str(a) for a in diagnose_it]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == [1, TOKENS] and values["chunks_read"] == 4
    found = {(f["id"], f["severity"]) for f in values["findings"]}
    assert found == {("zero-init", "info"), ("updates-rounded", "info"), ("safe-range", "info")}


def test_a_layer_that_writes_is_healthy(ids: Tensor) -> None:
    model, generator = converted(12, 18, 24), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in fast_weights(model).values():
            layer.ttt.conv.copy_(torch.randn(layer.ttt.conv.shape, generator=generator) * 3e-3)
    diagnosis = diagnose(model, {"input_ids": ids})
    assert ids_of(diagnosis, "severe") == set()
    ratios = [writes.state_ratio for writes in diagnosis.measured.writes.values()]
    assert all(1e-4 < ratio < 0.1 for ratio in ratios)


def test_the_last_layer_is_named(ids: Tensor) -> None:
    """Its keys span four dimensions, and its conv takes the gradient."""
    diagnosis = diagnose(converted(12, 29), {"input_ids": ids})
    assert ids_of(diagnosis, "severe") == {("layer-dominates", (29,))}
    assert ids_of(diagnosis, "warning") == {("keys-collide", (29,))}
    assert diagnosis.measured.keys[29].effective < 10 < diagnosis.measured.keys[12].effective
