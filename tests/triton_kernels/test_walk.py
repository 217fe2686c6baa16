"""The kernels by themselves: rounding, 64-bit addresses, determinism, chunk norms."""

import pytest
import torch
from torch import Tensor

from inplace_ttt.kernels import unsupported
from inplace_ttt.kernels.gram import squared_norms
from inplace_ttt.kernels.schedule import Launch
from inplace_ttt.kernels.walk import walk as walk_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def walk(
    a: Tensor, b: Tensor, carry: Tensor, slots: Tensor | None, *, first: int, stop: int, chunk: int, steps: int, backward: bool = False,
    start: Tensor | None = None, **settings: object,
) -> None:  # fmt: skip
    """A launch of one stretch: `steps` chunks of one document from the token `first` on, a slot each."""
    count = 0 if slots is None else len(slots)
    entry = [
        first,
        stop,
        steps,
        count - 1 if backward else 0,
        count,
        1,
        0,
        -1 if start is None else 0,
        0,
        0,
        0,
    ]
    table, bounds = (torch.tensor(numbers, dtype=torch.int32, device=a.device) for numbers in (entry, [0, 1]))
    is_cut = backward and stop - first < chunk
    launch = Launch(table.view(1, -1), bounds, None, (), 1, 1, steps, count, 0, True, is_cut, backward, True)
    start = None if start is None else start[None]
    walk_launch(
        a,
        b,
        launch,
        chunk=chunk,
        shape=tuple(carry.shape),
        slots=slots,
        start=start,
        final=carry[None],
        **settings,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_small_change_survives_rounding_on_average(dtype: torch.dtype) -> None:
    """ηS of a twentieth of a step of W0's grid: to nearest it is lost, by dither it is there within the noise
    of chance."""
    chunk, d, h = 16, 64, 128
    values, keys = (
        torch.ones(2 * chunk, d, device=DEVICE, dtype=dtype),
        torch.ones(2 * chunk, h, device=DEVICE, dtype=dtype),
    )
    part = torch.finfo(dtype).eps / 20
    for w0 in (1.5, -1.5):
        found = {}
        for dither in (False, True):
            slots, carry = torch.empty(2, d, h, device=DEVICE, dtype=dtype), torch.empty(d, h, device=DEVICE)
            base = torch.full((d, h), w0, device=DEVICE, dtype=dtype)
            walk(
                values,
                keys,
                carry,
                slots,
                first=0,
                stop=2 * chunk,
                chunk=chunk,
                steps=2,
                scale=part / chunk,
                base=base,
                dither=dither,
            )
            found[dither] = (slots.double() - w0).mean(dim=(1, 2)).cpu() / part
        assert found[False].tolist() == [0, 0]
        # 8192 draws of 20 with probability 1/20, then 2/20: standard deviations 0.05 and 0.07
        assert (found[True] - torch.tensor([1.0, 2.0])).abs().max() < 0.25, found[True]


def test_dither_keeps_what_lies_on_the_grid_and_what_is_not_finite() -> None:
    w0 = draw(32, 64)
    w0[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    slots, carry = (
        torch.empty(1, 32, 64, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(32, 64, device=DEVICE),
    )
    zero, start = torch.zeros(16, 64, device=DEVICE, dtype=torch.bfloat16), torch.zeros(32, 64, device=DEVICE)
    # the NaN of a GPU: one more bit and it is -0
    start[1, 0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    walk(
        zero[:, :32].contiguous(),
        zero,
        carry,
        slots,
        first=0,
        stop=16,
        chunk=16,
        steps=1,
        start=start,
        base=w0,
        dither=True,
    )
    w0[1, 0] = float("nan")
    assert torch.equal(slots[0].nan_to_num(7.0), w0.nan_to_num(7.0))


def test_chunks_are_rounded_by_different_chances() -> None:
    slots, carry = (
        torch.empty(2, 32, 64, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(32, 64, device=DEVICE),
    )
    values, keys = (
        torch.zeros(32, 32, device=DEVICE, dtype=torch.bfloat16),
        torch.zeros(32, 64, device=DEVICE, dtype=torch.bfloat16),
    )
    start = torch.full((32, 64), 1 + 2**-9, device=DEVICE)
    walk(
        values,
        keys,
        carry,
        slots,
        first=0,
        stop=32,
        chunk=16,
        steps=2,
        start=start,
        base=0 * draw(32, 64),
        dither=True,
    )
    assert (slots[0] != slots[1]).float().mean() > 0.2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chunk", [16, 3], ids=["descriptors", "pointers"])
def test_addresses_have_64_bits(chunk: int, backward: bool) -> None:
    """Rows 2^30 numbers apart, so that the third is past 2^31; what lies between is never touched and takes
    no memory."""
    if DEVICE == "cuda" and torch.cuda.get_device_properties(0).total_memory < 30 << 30:
        raise RuntimeError(
            "this test needs 30 GiB on the GPU; run it with CUDA_VISIBLE_DEVICES= through the interpreter instead."
        )
    rows, stride = 5, 2**30 + 64
    sparse = torch.empty((rows - 1) * stride + 16, dtype=torch.bfloat16, device=DEVICE).as_strided(
        (rows, 16), (stride, 1)
    )
    dense = draw(rows, 16)
    sparse.copy_(dense)
    carry, again = torch.empty(16, 16, device=DEVICE), torch.empty(16, 16, device=DEVICE)
    for x, into in ((sparse, carry), (dense, again)):
        walk(x, x, into, None, first=2 if backward else 0, stop=rows, chunk=chunk, steps=1, backward=backward)
    assert torch.equal(carry, again) and carry.abs().sum() > 0
    starts = torch.tensor([0], device=DEVICE)
    assert torch.equal(squared_norms(sparse, sparse, starts, rows), squared_norms(dense, dense, starts, rows))


@pytest.mark.parametrize("chunk", [16, 9], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("poisoned", ["values", "keys"])
def test_nothing_past_the_end_of_a_document_is_read(poisoned: str, chunk: int) -> None:
    rows = {"values": draw(24, 32, seed=1), "keys": draw(24, 32, seed=2)}
    wanted = rows["values"][:12].float().T @ rows["keys"][:12].float()
    rows[poisoned][12:] = float("nan")
    carry = torch.empty(32, 32, device=DEVICE)
    first = 12 - 12 % chunk
    walk(
        rows["values"],
        rows["keys"],
        carry,
        None,
        first=first,
        stop=12,
        chunk=chunk,
        steps=1 + first // chunk,
        backward=True,
    )
    assert torch.allclose(carry, wanted, rtol=1e-5, atol=1e-5)


def test_two_runs_give_the_same_bits() -> None:
    values, keys, results = draw(64, 40, seed=1), draw(64, 72, seed=2), []
    for _ in range(2):
        slots, carry = (
            torch.empty(2, 40, 72, device=DEVICE, dtype=torch.bfloat16),
            torch.empty(40, 72, device=DEVICE),
        )
        walk(values, keys, carry, slots, first=0, stop=64, chunk=32, steps=2, base=draw(40, 72), dither=True)
        results.append((slots, carry))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)], ids=str)
@pytest.mark.parametrize("chunk", [5, 70])
def test_norms_of_chunks(chunk: int, dtype: torch.dtype, bound: float) -> None:
    values, keys = draw(2 * chunk + 3, 19, dtype=dtype), draw(2 * chunk + 3, 33, seed=1, dtype=dtype)
    starts = [0, chunk + 2]
    found = squared_norms(values, keys, torch.tensor(starts, device=DEVICE), chunk)
    wanted = [
        (values[s : s + chunk].double().T @ keys[s : s + chunk].double()).square().sum() for s in starts
    ]
    assert torch.allclose(found.double(), torch.stack(wanted), rtol=bound)
    assert squared_norms(0 * values, keys, torch.tensor(starts, device=DEVICE), chunk).tolist() == [0, 0]


def test_what_is_not_supported_is_named() -> None:
    assert "not float64" in (unsupported(torch.device(DEVICE), torch.float64) or "")
    assert unsupported(torch.device(DEVICE), torch.bfloat16) is None
