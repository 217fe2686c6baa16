"""What was read without writes is read once: for the same weights, rows and window, and for nothing else."""

from pathlib import Path

import pytest
import torch
from families import build
from models import converted, random_ids
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, KeyWhitening, convert
from inplace_ttt.evaluation.baseline_losses import BaselineLosses
from inplace_ttt.evaluation.token_losses import token_losses

ROWS = random_ids(2, 40)


class Counted:
    """Tokens that are really read, by the forwards of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        self.tokens += kwargs["input_ids"].numel()


def read(
    model: PreTrainedModel, folder: Path | None, rows: Tensor = ROWS, window: int | None = None
) -> tuple[Tensor, int]:
    """The losses, and how many tokens the model had to read for them."""
    counted, told = Counted(model), []
    losses = BaselineLosses(folder).of(model, rows, window=window, sinks=2, progress=told.append)
    assert sum(told) == rows.numel(), "the bar moves, read or found"
    return losses, counted.tokens


def test_another_model_on_the_same_base_reads_nothing_again(tmp_path: Path) -> None:
    base = build("llama")
    first, tokens = read(converted("llama"), tmp_path)
    assert tokens == ROWS.numel() and torch.equal(first, token_losses(base, ROWS))
    other = convert(build("llama"), InPlaceTTTConfig(layers=(0,), chunk_size=4, whitening=KeyWhitening()))
    for model in (other, base):
        found, tokens = read(model, tmp_path)
        assert tokens == 0 and torch.equal(found, first)
    assert len(list(tmp_path.iterdir())) == 1


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """One weight of W0, by one unit in the last place."""
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))
    return model


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (lambda: changed(converted("llama")), {}),
        (lambda: converted("llama").bfloat16(), {}),
        (lambda: converted("llama"), {"window": 5}),
        (lambda: converted("llama"), {"rows": ROWS.flip(0)}),
        (lambda: converted("llama"), {"rows": ROWS.view(4, 20)}),
    ],
    ids=["W0", "dtype", "window", "other rows", "other shape"],
)
def test_whatever_is_not_the_same_is_read(model, settings: dict, tmp_path: Path) -> None:
    read(converted("llama"), tmp_path)
    found, tokens = read(model(), tmp_path, **settings)
    assert tokens == ROWS.numel() and torch.equal(found, read(model(), None, **settings)[0])


def test_what_is_not_whole_is_read(tmp_path: Path) -> None:
    first, _ = read(converted("llama"), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    found, tokens = read(converted("llama"), tmp_path)
    assert tokens == ROWS.numel() and torch.equal(found, first)
    assert read(converted("llama"), tmp_path)[1] == 0, "and mended"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InPlaceTTTError, match=r"cannot write .*file: .*; name another folder"):
        BaselineLosses(tmp_path / "file")


def test_a_folder_is_made_once_there_is_something_to_keep(tmp_path: Path) -> None:
    BaselineLosses(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    read(converted("llama"), tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 1
