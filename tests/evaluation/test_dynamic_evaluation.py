"""Dynamic evaluation: plain gradient descent on the down-projections, which one-step loss gradients equal."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from families import build
from models import distance, random_ids

from inplace_ttt import InPlaceTTTConfig, calibrate, cli, convert
from inplace_ttt.evaluation.comparison import compare
from inplace_ttt.evaluation.dynamic_evaluation import descent_losses, dynamic_evaluation
from inplace_ttt.evaluation.protocol import Protocol
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.surgery import fast_weights

CHUNK = 16


def model(layers: tuple[int, ...], eta: float = 0.3) -> Any:
    config = InPlaceTTTConfig(layers=layers, chunk_size=CHUNK, target="gradient", eta=eta)
    converted = convert(build("llama").double().eval(), config)
    calibrate(converted, [random_ids(1, 64, seed=2)])
    return converted


@pytest.mark.parametrize("window", [None, 24])
def test_it_equals_the_sum_of_loss_gradients_at_the_same_rate(window: int | None) -> None:
    """The mean over 15 predicted tokens at this rate is the sum at η times the gain."""
    converted = model((1,))
    (layer,) = fast_weights(converted).values()
    rate = 0.3 * float(layer.ttt.gain) * (CHUNK - 1)
    ids = random_ids(1, 70)
    protocol = Protocol(window=window)
    found = descent_losses(converted, ids, rate, protocol)
    wanted = token_losses(converted, ids, piece=CHUNK, **protocol.attention)
    assert distance(found, wanted) < 1e-5
    off = descent_losses(converted, ids, 1e-12, protocol)
    assert distance(off, wanted) > 1e-3, "the steps do not show"


def test_it_is_plain_descent_on_the_weights() -> None:
    """Two layers, by changing a copy's weights in place."""
    converted, ids = model((0, 2)), random_ids(1, 40)
    found = descent_losses(converted, ids, 2.0, Protocol())
    plain = build("llama").double().eval()
    weights = [plain.model.layers[i].mlp.down_proj.weight for i in (0, 2)]
    cache, wanted = None, []
    for start in range(0, 40, CHUNK):
        chunk, targets = ids[:, start : start + CHUNK], ids[0, start + 1 : start + CHUNK + 1]
        out = plain(input_ids=chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        for kept in cache.layers:
            kept.keys, kept.values = kept.keys.detach(), kept.values.detach()
        wanted.append(
            torch.nn.functional.cross_entropy(out.logits[0, : len(targets)], targets, reduction="none")
        )
        if chunk.shape[1] == CHUNK:
            loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], chunk[0, 1:])
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.data -= 2.0 * gradient
    assert distance(found[0], torch.cat(wanted).detach().float()) < 1e-5


def test_gains_are_paired_by_document() -> None:
    converted = model((0, 2)).float()
    documents = [random_ids(60 + 8 * place, seed=place) for place in range(3)]
    protocol = Protocol(skip=CHUNK, batch_size=2)
    known = compare(converted, documents, protocol)
    (row,) = dynamic_evaluation(converted, documents, known, [1e-9])
    assert row["rate"] == 1e-9 and row["loss"] == pytest.approx(known.mean("off"), abs=1e-4)
    assert row["difference"]["mean"] == pytest.approx(0, abs=1e-5)
    assert row["document_gain"]["mean"] == pytest.approx(0, abs=1e-5)
    assert row["on_minus_dynamic"]["mean"] == pytest.approx(known.paired("on", "off").mean, abs=1e-4)
    alone = compare(converted, documents[:1], protocol)
    assert dynamic_evaluation(converted, documents[:1], alone, [1.0])[0]["document_gain"] is None


def test_evaluate_prints_the_rival(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted = tiny.save_converted(tiny.save_base(tmp_path / "base"), tmp_path / "converted")
    texts = [tmp_path / f"{place}.txt" for place in range(2)]
    for place, text in enumerate(texts):
        text.write_text(" ".join(str(number * (place + 3)) for number in range(200)))
    read = ["evaluate", str(converted), "--text", *map(str, texts), "--tokens", "100"]
    capsys.readouterr()
    assert cli.main([*read, "--rivals", "--rates", "0.5,2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["dynamic_evaluation"]
    assert [row["rate"] for row in rows] == [0.5, 2.0]
    assert cli.main([*read, "--rivals", "--rates", "0.5"]) == 0
    assert "dynamic evaluation, rate 0.5: " in capsys.readouterr().out
    for wrong in ("0", "a", "1,,2", "-1", "inf"):
        assert cli.main([*read, "--rivals", "--rates", wrong]) == 2
    assert cli.main([*read, "--rates", "1"]) == 2
