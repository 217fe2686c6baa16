"""Titans' memory as context: the layer by its definition, and the model's shared streams by the model
itself."""

import pytest
import torch
import torch.nn.functional as F
from models import distance
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.memories.mac import MACLayer, MACModel


def model(**options: int) -> MACModel:
    torch.manual_seed(0)
    return MACModel(dim=8, segment=4, feedforward=8, theta=0.05, **options).double()


def series(length: int, width: int = 1) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_layer_by_its_definition() -> None:
    torch.manual_seed(0)
    layer = MACLayer(8, segment=4, heads=2, persistent=3, encoder_layers=2, feedforward=8).double()
    x = series(8, width=8)
    _, state = layer(x[:, :4])
    y, after = layer(x[:, 4:], state)
    w1, w2 = (w[:, 0] for w in state.now)
    q = F.normalize(F.silu(layer.memory.to_q(x[:, 4:])), dim=-1)
    h = F.silu(q @ w1.mT) @ w2.mT
    attended = layer.attention(torch.cat([h, layer.persistent.expand(2, -1, -1), x[:, 4:]], dim=1))
    out = layer.mix(F.silu(attended).flatten(1)).view(2, 4, 8)
    z, expected = layer.memory.primal(out, state)
    assert distance(y, out * z.sigmoid()) < 1e-12 and distance(after.now[0], expected.now[0]) < 1e-12
    assert distance(layer(x[:, 4:])[0], y) > 1e-4  # what the memory held made a difference


@pytest.mark.parametrize("memory_layers", [1, 2])
@pytest.mark.parametrize("length", [5, 8, 9, 19])
def test_every_next_is_the_model_on_every_prefix(length: int, memory_layers: int) -> None:
    mac, x = model(memory_layers=memory_layers), series(length)
    expected = torch.stack([mac(x[:, :t]) for t in range(4, length)], dim=1)
    found = mac.every_next(x)
    assert found.shape == expected.shape and distance(found, expected) < 1e-12
    phases = torch.tensor([1, 3])
    some = mac.every_next(x, phases)
    for segment in range(some.shape[1]):
        for column, phase in enumerate(phases.tolist()):
            if (t := 4 + 4 * segment + phase) < length:
                assert distance(some[:, segment, column], expected[:, t - 4]) < 1e-12


def test_the_answer_depends_on_what_only_the_memory_can_carry() -> None:
    """The last segment answers, yet an element before it matters; what is left over at the front does not."""
    mac, x = model(), series(14)
    changed = x.clone()
    changed[:, 2] += 1
    assert distance(mac(changed), mac(x)) > 1e-9
    changed = x.clone()
    changed[:, :2] += 1
    assert mac(changed).equal(mac(x))


def test_every_parameter_learns() -> None:
    mac = model()
    mac.every_next(series(19)).square().sum().backward()
    for name, parameter in mac.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_series_shorter_than_a_segment_is_refused() -> None:
    with pytest.raises(InPlaceTTTError, match="a series of 3 is shorter than a segment of 4"):
        model()(series(3))
    with pytest.raises(InPlaceTTTError, match="a series of 4 must be longer than a segment of 4"):
        model().every_next(series(4))
