"""The target generator against torch's own convolution."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout

D = 6
KERNELS = [
    ("lookahead", 1),
    ("lookahead", 3),
    ("lookahead", 5),
    ("lookahead", 9),
    ("causal", 1),
    ("causal", 2),
    ("causal", 5),
    ("causal", 8),
]


def generator(conv: str, kernel_size: int, dtype: torch.dtype = torch.float64) -> TargetGenerator:
    ttt = TargetGenerator(D, kernel_size, conv, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    for parameter in ttt.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    return ttt


def source(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 4, 11])
@pytest.mark.parametrize(("conv", "kernel_size"), KERNELS)
def test_one_chunk_is_a_depthwise_conv1d_and_a_matrix(conv: str, kernel_size: int, length: int) -> None:
    ttt, x = generator(conv, kernel_size), source(2, length)
    before = kernel_size // 2 if conv == "lookahead" else kernel_size - 1
    padded = pad(x.mT, (before, kernel_size - 1 - before))
    expected = conv1d(padded, ttt.conv, groups=D).mT @ ttt.proj
    found = ttt(x, ChunkLayout.from_lengths([[length], [length]], length + 3))
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("conv", "kernel_size"), KERNELS)
def test_chunks_are_convolved_one_by_one_and_padding_is_zero(conv: str, kernel_size: int) -> None:
    ttt, x = generator(conv, kernel_size), source(2, 20)
    layout = ChunkLayout((((2, 13), (13, 19)), ((0, 7),)), 20, 4)
    expected = torch.zeros_like(x)
    for row, documents in enumerate(layout.documents):
        for start, stop in (chunk for document in documents for chunk in layout.chunks(document)):
            alone = ChunkLayout.from_lengths([[stop - start]], 100)
            expected[row, start:stop] = ttt(x[row : row + 1, start:stop], alone)[0]
    assert torch.allclose(ttt(x, layout), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("conv", "kernel_size"), KERNELS)
def test_padding_may_hold_anything(conv: str, kernel_size: int) -> None:
    ttt, x = generator(conv, kernel_size), source(1, 12)
    layout = ChunkLayout((((3, 9),),), 12, 4)
    found = []
    for rubbish in (0.0, float("nan"), float("inf")):
        dirty = x.clone()
        dirty[:, :3], dirty[:, 9:] = rubbish, rubbish
        dirty.requires_grad_()
        v = ttt(dirty, layout)
        found.append([v.detach(), *torch.autograd.grad(v.square().sum(), [dirty, ttt.conv, ttt.proj])])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not found[0][0][:, :3].any() and not found[0][1][:, 9:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_targets_come_in_the_parameters_dtype_and_gradients_in_the_sources(dtype: torch.dtype) -> None:
    ttt = generator("lookahead", 5, dtype)
    x = source(1, 9).to(torch.bfloat16 if dtype == torch.float32 else torch.float32).requires_grad_()
    v = ttt(x, ChunkLayout.from_lengths([[9]], 4))
    v.sum().backward()
    assert v.dtype == ttt.conv.grad.dtype == ttt.proj.grad.dtype == dtype and x.grad.dtype == x.dtype


def test_bfloat16_conv_gradients_are_summed_in_float32() -> None:
    """4096 ones in a bfloat16 sum would stop at 256."""
    ttt = TargetGenerator(D, 3, "lookahead", dtype=torch.bfloat16)
    torch.nn.init.eye_(ttt.proj)
    ttt(torch.ones(1, 4096, D), ChunkLayout.from_lengths([[4096]], 4096)).sum().backward()
    assert ttt.conv.grad[:, 0, 1].tolist() == [4096.0] * D


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_start_is_neutral_seeded_and_of_the_given_spread(dtype: torch.dtype) -> None:
    ttt, again, other = (TargetGenerator(2000, 5, "lookahead", dtype=dtype) for _ in range(3))
    for target, seed in ((ttt, 3), (again, 3), (other, 4)):
        for parameter in target.parameters():
            parameter.data.fill_(9)
        target.reset_parameters(std=0.02, seed=seed)
    diagonal = ttt.proj.diagonal().float()
    assert not ttt.conv.any() and torch.equal(ttt.proj, torch.diag(ttt.proj.diagonal()))
    assert abs(diagonal.mean().item()) < 0.002 and abs(diagonal.std().item() / 0.02 - 1) < 0.1
    assert torch.equal(ttt.proj, again.proj) and not torch.equal(ttt.proj, other.proj)
    assert not ttt(torch.randn(1, 7, 2000), ChunkLayout.from_lengths([[7]], 7)).any()


def test_the_parameters_are_conv_and_proj() -> None:
    shapes = {name: tuple(p.shape) for name, p in TargetGenerator(D, 4, "causal").named_parameters()}
    assert shapes == {"conv": (D, 1, 4), "proj": (D, D)}
