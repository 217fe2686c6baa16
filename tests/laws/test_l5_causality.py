"""L5: no token reads what comes later, nor what its own chunk writes."""

import pytest
import torch
from models import CHUNK, NAMES, converted, distance, logits, random_ids
from torch import Tensor

from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
from inplace_ttt.surgery import fast_weights

LENGTH = 4 * CHUNK + 3


def with_other_token(ids: Tensor, t: int) -> Tensor:
    other = ids.clone()
    other[:, t] = 3 + (other[:, t] - 2) % 94
    return other


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_changes_nothing_before_it(name: str, use_cache: bool) -> None:
    model, ids = converted(name), random_ids(2, LENGTH)
    before = logits(model, ids, use_cache=use_cache)
    for t in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4, LENGTH - 1):
        after = logits(model, with_other_token(ids, t), use_cache=use_cache)
        assert torch.equal(after[:, :t], before[:, :t]), f"token {t} changes an earlier one"
        assert distance(after[:, t], before[:, t]) > 1e-3


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_chunk_reads_w0(name: str, use_cache: bool) -> None:
    """Its own write reaches the second chunk and not itself."""
    ids = random_ids(2, LENGTH)
    on, off = (logits(converted(name, writes=writes), ids, use_cache=use_cache) for writes in (True, False))
    assert torch.equal(on[:, :CHUNK], off[:, :CHUNK])
    assert (on[:, CHUNK] - off[:, CHUNK]).abs().max() > 1e-4


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("w0", [True, False])
def test_a_chunk_reads_the_writes_of_earlier_ones_alone(backend: str, clip: float | None, w0: bool) -> None:
    """d out[t] / d v[s] is not zero exactly where s is in an earlier chunk of t's document."""
    layout = ChunkLayout((((0, 8), (9, 19)),), 20, 3)
    g = torch.Generator().manual_seed(0)
    z, v = (torch.randn(1, 20, n, generator=g, dtype=torch.float64) for n in (4, 5))
    weight = torch.randn(5, 4, generator=g, dtype=torch.float64) if w0 else None

    def op(v: Tensor) -> Tensor:
        return fast_weight(z, v, weight, eta=0.7, layout=layout, clip=clip, backend=backend).sum(-1)[0]

    reads = torch.autograd.functional.jacobian(op, v)[:, 0].abs().sum(-1) > 0
    chunk = layout.chunk_ids()[0]
    document = torch.tensor([0] * 8 + [-1] + [1] * 10 + [-2])
    expected = (document[:, None] == document[None]) & (chunk[:, None] > chunk[None])
    assert torch.equal(reads, expected) and expected.any()


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 30])
@pytest.mark.parametrize(
    ("conv", "kernel_size", "first", "last"),
    [
        ("lookahead", 5, -2, 2),
        ("lookahead", 3, -1, 1),
        ("lookahead", 1, 0, 0),
        ("causal", 5, -4, 0),
        ("causal", 4, -3, 0),
    ],
)
def test_the_convolution_stays_in_its_chunk(
    conv: str, kernel_size: int, first: int, last: int, chunk_size: int
) -> None:
    """d V[t] / d x[s] is not zero exactly where s is a tap of t inside t's own chunk."""
    layout = ChunkLayout((((1, 9), (9, 18)),), 20, chunk_size)
    ttt = TargetGenerator(3, kernel_size, conv, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    for parameter in ttt.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    x = torch.randn(1, 20, 3, generator=g, dtype=torch.float64)
    reads = torch.autograd.functional.jacobian(lambda x: ttt(x, layout).sum(-1)[0], x)[:, 0].abs().sum(-1) > 0
    chunk = layout.chunk_ids()[0]
    offset = torch.arange(20)[None] - torch.arange(20)[:, None]
    expected = (chunk[:, None] == chunk[None]) & (chunk[:, None] >= 0) & (first <= offset) & (offset <= last)
    assert torch.equal(reads, expected)


def targets(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """V of the first TTT layer in one call over `ids`."""
    seen: list[Tensor] = []
    handle = fast_weights(model)[0].ttt.register_forward_hook(lambda module, args, v: seen.append(v))
    logits(model, ids)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(("conv", "reach"), [("lookahead", range(-2, 3)), ("causal", range(5))])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_look_ahead_exists_and_ends_at_the_chunk(name: str, conv: str, reach: range) -> None:
    """A token's change alters what its chunk writes at the tokens before it ("lookahead"), never the chunk
    before."""
    model, ids = converted(name, conv=conv), random_ids(1, LENGTH)
    before = targets(model, ids)
    for t in (0, 3, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH - 1):
        changed = (targets(model, with_other_token(ids, t)) != before).any(-1)[0].nonzero().flatten().tolist()
        assert changed == [t + r for r in reach if (t + r) // CHUNK == t // CHUNK and 0 <= t + r < LENGTH]
