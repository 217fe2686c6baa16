"""What is measured on a text: keys that come out white, targets of the residual stream's size; on disk and
back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.folders import bytes_of
from families import build
from models import NAMES, distance, logits, random_ids
from tiny import save_base, text
from torch import Tensor
from torch.nn.functional import cross_entropy
from widest import Widest

from inplace_ttt import (
    InPlaceTTTConfig,
    InPlaceTTTError,
    KeyWhitening,
    calibrate,
    cli,
    convert,
    language_head,
    load,
    save_adapter,
)
from inplace_ttt.calibration.activations import feeling, probing, seeing
from inplace_ttt.calibration.calibrate import whitened
from inplace_ttt.calibration.directions import Directions
from inplace_ttt.calibration.initial_projection import initial_projections, least_squares
from inplace_ttt.surgery import disable_ttt, fast_weights

RIDGE = {
    "layers": (0, 2),
    "chunk_size": 8,
    "whitening": KeyWhitening(shrinkage=1e-6),
    "normalize_targets": True,
    "proj_init": "calibrated",
    "update_rule": "ridge",
    "ridge": 1.0,
}


def inputs(model: Any, rows: list[Tensor]) -> dict[int, Tensor]:
    """Every TTT layer's keys and the residual stream before it, as the model itself makes them."""
    seen: dict[int, list[Tensor]] = {index: [] for index in fast_weights(model)}
    handles = [
        layer.register_forward_pre_hook(lambda m, args, i=index: seen[i].append(args[0].detach()[0]))
        for index, layer in fast_weights(model).items()
    ]
    for row in rows:
        model.model(row, use_cache=False)
    for handle in handles:
        handle.remove()
    return {index: torch.cat(parts) for index, parts in seen.items()}


def residual(model: Any, rows: list[Tensor]) -> float:
    """Mean over rows of the median norm of what enters layer 2."""
    return sum(
        float(model.model(row, output_hidden_states=True).hidden_states[2].norm(dim=-1).median())
        for row in rows
    ) / len(rows)


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
def test_keys_come_out_white_and_targets_standard(target: str) -> None:
    model = convert(build("llama", dtype=torch.float64), InPlaceTTTConfig(**RIDGE, target=target))
    rows = [random_ids(1, 200, seed=s) for s in range(3)]
    calibrate(model, rows)
    for index, z in inputs(model, rows).items():
        layer = fast_weights(model)[index]
        keys = layer.keys(z)
        moment = keys.T @ keys / len(keys)
        assert float(moment.trace()) == pytest.approx(1, rel=1e-3)
        assert distance(moment, torch.eye(len(moment), dtype=moment.dtype) / len(moment)) < 0.02
    if target == "embeddings":
        table = model.get_input_embeddings().weight.detach()
        x = table[torch.cat(rows, 1)[0]]
        assert distance(layer.ttt.mean, table.mean(0)) < 1e-5
        size = residual(model, rows)
        assert float(layer.ttt.gain) * float((x - table.mean(0)).square().sum(1).mean().sqrt()) == (
            pytest.approx(size, rel=1e-3)
        )
        assert layer.ttt.normalize_source(table).mean(0).norm() < 1e-3 * size


def test_a_key_grows_as_its_input_does() -> None:
    """As what W0 gives does: behind a norm, whatever a token of next to no input reads beyond its share is
    all that is left of it."""
    model = convert(build("gemma3", dtype=torch.float64), InPlaceTTTConfig(**RIDGE))
    rows = [random_ids(1, 200)]
    calibrate(model, rows)
    for index, z in inputs(model, rows).items():
        keys = fast_weights(model)[index].ttt.keys
        assert keys is not None and keys.center.norm() > 0.1
        for size in (1e-6, 0.5, 100.0):
            assert distance(keys(size * z), size * keys(z)) < 1e-9
        assert not keys(torch.zeros_like(z)).any()
        nothing = torch.zeros_like(z[:3], requires_grad=True)
        keys(nothing).sum().backward()
        assert nothing.grad is not None and nothing.grad.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "granite", "gemma3", "olmo2"])
def test_targets_are_as_large_as_the_stream_where_they_arrive(name: str) -> None:
    """Behind a multiplier or a norm a write of that size would be nothing, or all there is: by differences,
    what the block makes of it."""
    model = convert(build(name, dtype=torch.float64), InPlaceTTTConfig(**RIDGE))
    row, out = random_ids(1, 120), {}
    block, down = (
        model.model.layers[2] if name != "gpt_neox" else model.gpt_neox.layers[2],
        fast_weights(model)[2],
    )
    step = 1e-4 * (
        torch.randint(2, (1, 120, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
        - 1
    )
    for push in (0.0, 1.0):
        handles = [
            down.register_forward_hook(lambda module, args, y, push=push: y + push * step),
            block.register_forward_hook(
                lambda module, args, y, push=push: out.__setitem__(push, y[0] if isinstance(y, tuple) else y)
            ),
        ]
        with torch.no_grad(), disable_ttt(model):
            model(row, use_cache=False)
        for handle in handles:
            handle.remove()
    moved = float(((out[1.0] - out[0.0]).norm(dim=-1) / step.norm(dim=-1)).median())
    with torch.no_grad(), disable_ttt(model), feeling(model) as felt:
        model(row, use_cache=False)
    assert float(felt[2]) == pytest.approx(moved, rel=0.1) and (float(felt[2]) == 1) == (
        name in ("llama", "gpt_neox")
    )
    calibrate(model, [row])
    assert not any(
        parameter.grad is not None or not parameter.requires_grad for parameter in model.parameters()
    )
    with torch.no_grad(), disable_ttt(model), seeing(model) as seen:
        model(row, use_cache=False)
    here = seen[2]
    size = float((here.source - down.ttt.mean).square().sum(-1).mean().sqrt() * down.ttt.gain)
    assert size * float(felt[2]) == pytest.approx(float(here.stream.norm(dim=-1).median()), rel=0.02)


def test_a_low_rank_whitens_the_largest_directions() -> None:
    values = torch.tensor([100.0, 25.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    turn, _ = torch.linalg.qr(
        torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    sigma = turn @ values.diag() @ turn.T
    found = whitened(Directions(values[:2], turn[:, :2], float(values.sum()), torch.zeros(6)), shrinkage=1e-9)
    assert distance(found @ sigma @ found.T, torch.eye(2, dtype=torch.float64) / 2) < 1e-6
    assert float((found @ turn[:, 2:]).abs().max()) < 1e-6


def test_without_measurement_a_model_says_so() -> None:
    model = convert(build("llama"), InPlaceTTTConfig(**RIDGE))
    with pytest.raises(InPlaceTTTError, match="calibrate"):
        logits(model, random_ids(1, 40))
    with pytest.raises(InPlaceTTTError, match="nothing to calibrate on"):
        calibrate(model, [])
    with pytest.raises(InPlaceTTTError, match="would do nothing"):
        calibrate(convert(build("llama"), InPlaceTTTConfig(layers=(0,))), [random_ids(1, 40)])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def test_convert_measures_saves_and_loads(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(text(400))
    arguments = [
        "--preset",
        "ridge",
        "--layers",
        "0,1",
        "--chunk-size",
        "16",
        "--calibrate",
        str(tmp_path / "a.txt"),
    ]
    arguments += ["--set", "whitening.rank=5", "--set", "ridge=0.5"]
    assert cli.main(["convert", str(base), str(tmp_path / "full"), *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identity"]["max_abs_logit_diff"] == 0 and result["new_parameters"] == 2 * (
        32 * 5 + 32 * 32
    )
    assert (
        result["config"]["whitening"] == {"rank": 5, "shrinkage": 0.1, "centered": True}
        and result["config"]["ridge"] == 0.5
    )
    model = load(tmp_path / "full")
    assert all(
        layer.ttt.keys.directions.shape == (5, 64) and float(layer.ttt.gain) > 0
        for layer in fast_weights(model).values()
    )
    with torch.no_grad():
        for layer in fast_weights(model).values():
            layer.ttt.conv.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    ids = random_ids(1, 100)
    model.save_pretrained(tmp_path / "again")
    save_adapter(model, tmp_path / "adapter", base=str(base))
    for folder in ("again", "adapter"):
        assert torch.equal(logits(load(tmp_path / folder), ids), logits(model, ids)), folder
    load(tmp_path / "again").save_pretrained(tmp_path / "third")
    assert bytes_of(tmp_path / "third") == bytes_of(tmp_path / "again")
    capsys.readouterr()
    assert (
        cli.main(["export", str(tmp_path / "again"), str(tmp_path / "reference"), "--format", "reference"])
        == 2
    )
    assert "whitened keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "ridge"], "--calibrate TEXT"),
        (["--calibrate", "TEXT"], "does nothing"),
        (
            ["--preset", "ridge", "--calibrate", "nowhere.txt"],
            "the file or folder nowhere.txt does not exist",
        ),
        (["--preset", "ridge", "--calibrate", "EMPTY"], "holds no text"),
        (["--preset", "ridge", "--calibrate", "TEXT", "--calibrate-tokens", "0"], "at least 1"),
        (["--set", "sharpness=1"], "no setting 'sharpness'"),
        (["--set", "chunk_size"], "key=value"),
        (["--set", "chunk_size=many"], "chunk_size must be an integer"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(text(400))
    (tmp_path / "empty.txt").write_text("  \n")
    arguments = [
        {"TEXT": str(tmp_path / "a.txt"), "EMPTY": str(tmp_path / "empty.txt")}.get(a, a) for a in arguments
    ]
    assert cli.main(["convert", str(base), str(tmp_path / "out"), *arguments]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert says in err[-1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
def test_a_calibrated_p_is_the_downhill_map(target: str) -> None:
    """Against finite differences: what a small P, written by an oracle that knows the next token, does to the
    loss."""
    model = convert(build("llama", dtype=torch.float64), InPlaceTTTConfig(**RIDGE, target=target))
    rows = [random_ids(1, 60, seed=s) for s in range(3)]
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    calibrate(model, rows)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())

    def loss(step: float, layer: int, proj: Tensor) -> float:
        """Summed over the rows, with `step` times P applied to the next token's source at a layer's
        output."""
        total = 0.0
        for row in rows:
            with disable_ttt(model), seeing(model) as seen:
                model(row)
                ahead = fast_weights(model)[layer].ttt.normalize_source(seen[layer].source)[:, 1:]
            extra = torch.nn.functional.pad(step * ahead @ proj, (0, 0, 0, 1))
            handle = fast_weights(model)[layer].register_forward_hook(
                lambda m, args, out, extra=extra: out + extra
            )
            with disable_ttt(model):
                values = model(row).logits[0, :-1]
            handle.remove()
            total += float(torch.nn.functional.cross_entropy(values, row[0, 1:], reduction="sum"))
        return total

    with torch.no_grad():
        for index, layer in fast_weights(model).items():
            proj, step = layer.ttt.proj.detach(), 1e-6
            found = (loss(step, index, proj) - loss(-step, index, proj)) / (2 * step)
            random = torch.randn(proj.shape, dtype=proj.dtype, generator=torch.Generator().manual_seed(index))
            other = (loss(step, index, random) - loss(-step, index, random)) / (2 * step)
            assert found < 0 and abs(found) > 3 * abs(other) * float(proj.norm() / random.norm()), (
                index,
                found,
                other,
            )


def test_least_squares_finds_the_map_and_keeps_the_size() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator) * torch.tensor([1.0, 2, 3, 1, 1, 1])
    true = torch.randn(6, 6, generator=generator)
    proj = least_squares(x.T @ x, x.T @ (x @ true))
    assert torch.nn.functional.cosine_similarity(proj.flatten(), true.flatten(), dim=0) > 0.98
    assert float((x @ proj).square().sum() / x.square().sum()) == pytest.approx(1, rel=1e-4)
    with pytest.raises(InPlaceTTTError, match="no gradient"):
        least_squares(x.T @ x, torch.zeros(6, 6))


def test_a_calibrated_p_needs_the_next_token() -> None:
    for wrong in ({"conv": "causal"}, {"kernel_size": 1}):
        with pytest.raises(InPlaceTTTError, match="next token"):
            InPlaceTTTConfig(proj_init="calibrated", **wrong)


@pytest.mark.parametrize("name", NAMES)
def test_the_start_of_p_is_that_of_the_whole_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes a few tokens at a time, and what a family does to its logits is in the gradient."""
    model = convert(build(name), InPlaceTTTConfig(layers=(0, 2), chunk_size=8))
    row = random_ids(1, 40)
    monkeypatch.setattr(language_head, "_AT_ONCE", 7 * 97)
    with Widest() as made:
        found = initial_projections(model, [row])
    assert name != "llama" or made.numbers < 40 * 97
    with disable_ttt(model), seeing(model) as seen, probing(model) as probes:
        logits = model(row, use_cache=False).logits[0, :-1]
        gradients = torch.autograd.grad(
            cross_entropy(logits, row[0, 1:], reduction="sum"), list(probes.values())
        )
    for index, gradient in zip(probes, gradients, strict=True):
        ahead = seen[index].source[0, 1:]
        assert (
            distance(found[index], least_squares(ahead.T @ ahead, -ahead.T @ gradient.reshape(40, -1)[:-1]))
            < 1e-4
        )
    assert "forward" not in vars(model.base_model)
