"""What each of the other systems promises beyond the laws."""

import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from audit.public_classes import classes
from models import distance
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.memories import MEMORIES, DeltaNet, InPlaceTTT, LaCT, Titans, TTTLinear, make
from inplace_ttt.memories.lact import orthogonal
from inplace_ttt.memories.matrix import flash
from inplace_ttt.ops import fast_weight
from memories.systems import CHUNK, DIM, inputs, randomize, system


def test_deltanet_replaces_what_a_key_stood_for() -> None:
    """At β = 1 the state answers a key with its last value, and S = 0 learns it in one step."""
    memory = DeltaNet(DIM).double()
    torch.nn.init.constant_(memory.to_beta.bias, 40.0)
    x = inputs(9)
    _, state = memory(x)
    tokens = memory.tokens(x)
    assert distance(memory.query(state, tokens.k[:, :, -1:]), tokens.v[:, :, -1:]) < 1e-9
    assert distance(memory.query(state, tokens.k[:, :, :1]), tokens.v[:, :, :1]) > 1e-2


def test_titans_without_momentum_and_decay_is_gradient_descent() -> None:
    """α = η = 0 leaves the mini-batches of TTT: the same M, keys and values, read at every token."""
    x = inputs(13)
    titans = Titans(DIM, layers=1, chunk=4, alpha=0.0, eta=0.0, theta=0.05).double()
    randomize(titans)
    ttt = TTTLinear(DIM, mini_batch=4, eta_base=0.05, learned_rate=False, residual_norm=False).double()
    ttt.load_state_dict(titans.state_dict())
    tokens = titans.tokens(x)
    y, state = ttt.parallel(ttt.initial_state(3), tokens._replace(rates=tokens.rates[..., 2:]))
    assert (
        distance(titans(x)[0], ttt.output(y)) < 1e-12
        and distance(titans(x)[1].now[0], ttt.now(state)[0]) < 1e-12
    )


def test_titans_momentum_and_decay_by_hand() -> None:
    titans, x = system("titans, one layer"), inputs(7, batch=1)
    alpha, eta, theta = titans.rates
    k, v = titans.tokens(x).k[0, 0], titans.tokens(x).v[0, 0]
    start = m = titans.initial[0][0]
    s = torch.zeros_like(m)
    for t in range(7):
        start = m if t % 5 == 0 else start
        s = eta * s - theta * 2 * torch.outer(start @ k[t] - v[t], k[t])
        m = (1 - alpha) * m + s
    state = titans(x)[1]
    assert distance(state.now[0][0, 0], m) < 1e-12 and distance(state.surprise[0][0, 0], s) < 1e-12


def test_data_dependent_rates_start_as_the_constants() -> None:
    torch.manual_seed(0)
    constant = Titans(DIM, 2, alpha=0.003, eta=0.8, theta=0.02).double()
    learned = Titans(DIM, 2, alpha=0.003, eta=0.8, theta=0.02, data_dependent=True).double()
    learned.load_state_dict(constant.state_dict(), strict=False)
    assert distance(learned(inputs(20))[0], constant(inputs(20))[0]) < 1e-6


@pytest.mark.parametrize("data_dependent", [False, True])
def test_a_momentum_near_1_is_none_of_half_precision(data_dependent: bool) -> None:
    rates = (
        Titans(DIM, 2, eta=0.999, data_dependent=data_dependent)
        .bfloat16()
        .tokens(inputs(3, dtype=torch.bfloat16))
        .rates
    )
    assert rates.dtype == torch.float32 and (rates[..., 1] - 0.999).abs().max() < 1e-4


def test_lact_keeps_the_length_of_its_rows_and_not_the_size_of_its_rates() -> None:
    memory, x = system("lact"), inputs(15)
    state, twice = memory(x)[1], system("lact")
    for w, start in zip(state.weights, memory.initial, strict=True):
        assert distance(w.norm(dim=-1), start.norm(dim=-1).expand(3, -1, -1)) < 1e-12
        assert distance(w, start.expand_as(w)) > 0.1
    tokens = twice.tokens(x)
    y, _ = twice.parallel(twice.initial_state(3), tokens._replace(rates=2 * tokens.rates))
    assert distance(twice.output(y), memory(x)[0]) < 1e-5  # Muon sees directions alone


def test_lact_lowers_its_loss() -> None:
    """A step against the gradient: what was written is answered better than before, also after the norm."""
    torch.manual_seed(0)
    memory, x = LaCT(DIM, chunk=6).double(), inputs(6)
    tokens, before = memory.tokens(x), memory.initial_state(3)
    _, after = memory(x)
    losses = [
        memory.loss(memory.query(state, tokens.k), tokens.v).sum(dim=(1, 2, 3)) for state in (before, after)
    ]
    assert (losses[1] < losses[0]).all()


def test_lact_reads_a_chunk_before_writing_it() -> None:
    memory, x = LaCT(DIM, chunk=6).double(), inputs(7)
    before = memory.recall(x[:, :6], memory.initial_state(3))
    y, state = memory(x)
    assert distance(y[:, :6], before) < 1e-12 and state.filled == 1
    assert distance(y[:, 6:], memory.recall(x[:, 6:], memory.initial_state(3))) > 1e-3


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_orthogonal_flattens_the_spectrum(shape: tuple[int, int]) -> None:
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    found = orthogonal(g)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    assert (
        u.mT @ found @ vt.mT - torch.diag_embed((u.mT @ found @ vt.mT).diagonal(dim1=-2, dim2=-1))
    ).abs().max() < 1e-9
    assert orthogonal(torch.zeros(2, 3)).equal(torch.zeros(2, 3))


def test_in_place_is_the_op_of_a_converted_model() -> None:
    memory, x = InPlaceTTT(DIM, 12, chunk=5, eta=0.3).double(), inputs(13)
    randomize(memory)
    layout = ChunkLayout.from_lengths([[13]] * 3, 5)
    z, v = F.silu(memory.gate(x)) * memory.up(x), memory.ttt(x, layout)
    expected, s = fast_weight(
        z, v, memory.down.weight, eta=0.3, layout=layout, backend="reference", return_state=True
    )
    y, state = memory(x)
    assert (
        distance(y, expected) < 1e-12
        and distance(state.s[:, 0], s) < 1e-12
        and state.z.shape == (3, 1, 3, 12)
    )


def test_a_fresh_in_place_memory_is_a_gated_mlp() -> None:
    memory, x = InPlaceTTT(DIM, 12, chunk=5), inputs(13, dtype=torch.float32)
    assert distance(memory(x)[0], memory.down(F.silu(memory.gate(x)) * memory.up(x))) < 1e-6


@pytest.mark.parametrize("name", ["gla", "deltanet"])
def test_the_call_of_flash_linear_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop with that package's contract: tokens [B, T, H, d], state [B, H, key, value], o = scale ·
    qᵀ h."""

    def recurrence(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rates: Tensor,
        *,
        scale: float,
        initial_state: Tensor,
        output_final_state: bool,
    ):
        assert output_final_state and initial_state.is_contiguous()
        h, out = initial_state, []
        for t in range(q.shape[1]):
            if name == "gla":
                h = h * rates[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            else:
                error = v[:, t] - torch.einsum("bhkv,bhk->bhv", h, k[:, t])
                h = h + k[:, t].unsqueeze(-1) * (rates[:, t, :, None] * error).unsqueeze(-2)
            out.append(scale * torch.einsum("bhkv,bhk->bhv", h, q[:, t]))
        return torch.stack(out, dim=1), h

    memory, x = system(name), inputs(9)
    assert memory.kernel is not None
    package, ops = ModuleType("fla"), ModuleType("fla.ops")
    package.ops = ops
    setattr(ops, memory.kernel, recurrence)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", ops)
    state = memory(inputs(6, seed=8))[1]
    y, after = flash(memory.kernel, memory.tokens(x), state)
    expected, final = memory(x, state)
    assert distance(memory.output(y), expected) < 1e-12 and distance(after, final) < 1e-12


def test_bad_input_is_refused() -> None:
    with pytest.raises(
        InPlaceTTTError, match="memory 'mamba' does not exist; choose one of linear-attention, gla,"
    ):
        make("mamba", 8)
    with pytest.raises(InPlaceTTTError, match="dim 8 does not divide into 3 heads"):
        make("deltanet", 8, heads=3)
    for name in ("ttt-linear", "ttt-mlp", "titans", "lact"):
        with pytest.raises(InPlaceTTTError, match="dim 8 does not divide into 0 heads"):
            make(name, 8, heads=0)
    for name, options, message in (
        ("ttt-linear", {"form": "pubic"}, "form must be 'paper' or 'public', got 'pubic'"),
        ("lact", {"muon": "none"}, "muon must be 'usual' or 'public'"),
        ("lact", {"base_rate": 0.0}, "base_rate must be above 0"),
        ("lact", {"expand": 0}, "expand must be at least 1"),
        ("ttt-mlp", {"eta_base": math.nan}, "eta_base must be a number of at least 0"),
        ("gla", {"temperature": 0.0}, "temperature must be above 0"),
        ("titans", {"theta": math.nan}, "alpha, eta and theta must be 0 to 1"),
        ("deltanet", {"chunk": 2.5}, "must hold at least 1 token, got 2.5"),
        ("titans", {"eta": 1.5}, "alpha, eta and theta must be 0 to 1"),
        (
            "titans",
            {"eta": 1.0, "data_dependent": True},
            "must be between 0 and 1, where they depend on the data",
        ),
        ("in-place", {"kernel_size": 4}, "kernel_size 4 is even"),
        ("in-place", {"conv": "none"}, "conv must be one of"),
        ("in-place", {"hidden": 0}, "dim and hidden must be at least 1"),
    ):
        with pytest.raises(InPlaceTTTError, match=message):
            make(name, 8, **options)
    memory = make("deltanet", 8)
    with pytest.raises(InPlaceTTTError, match="the state has 2 sequences, but x has 1"):
        memory(torch.ones(1, 3, 8), memory.initial_state(2))
    with pytest.raises(InPlaceTTTError, match="the state has 1 sequences, but x has 2"):
        memory.recall(torch.ones(2, 3, 8), memory.initial_state(1))
    with pytest.raises(
        InPlaceTTTError, match="titans takes no option 'mini_batch'; it takes heads, layers, chunk, alpha"
    ):
        make("titans", 8, mini_batch=3)
    for name in MEMORIES:
        with pytest.raises(InPlaceTTTError, match="must hold at least 1 token, got 0"):
            make(name, 8, **{"mini_batch" if name.startswith("ttt") else "chunk": 0})
    with pytest.raises(
        InPlaceTTTError, match=r"x must be \[B, T, dim\] with at least one token, got \[2, 0, 8\]"
    ):
        make("titans", 8)(torch.zeros(2, 0, 8))
    with pytest.raises(InPlaceTTTError, match="choose heads of an even width, not 3"):
        make("ttt-mlp", 6, heads=2, form="public")
    with pytest.raises(InPlaceTTTError, match="layers must be 1 or 2, got 3"):
        make("titans", 8, layers=3)


@torch.no_grad()
def test_lact_is_its_public_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: the public code's Muon works in bfloat16, which is taken out of it here."""
    names = ("silu_backprop", "l2_norm", "zeropower_via_newtonschulz5", "block_causal_lact_swiglu")
    public = classes("lact/ttt_operation.py", *names)["block_causal_lact_swiglu"]
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    memory, x = LaCT(DIM, chunk=CHUNK, muon="public"), inputs(4 * CHUNK + 2, dtype=torch.float32)
    randomize(memory)
    tokens, (gate, up, down) = memory.tokens(x), memory.initial_weights(3)
    read, _ = memory.parallel(memory.initial_state(3), tokens)
    of_gate, of_up, of_down = tokens.rates.split(1, dim=-1)
    given = (gate, down, up, tokens.q, tokens.k, tokens.v, of_gate, of_down, of_up)
    found = public(*(tensor[:, 0] for tensor in given), CHUNK, use_muon=True)
    assert distance(read[:, 0], found) < 3e-5, "it adds 1e-5 to the norms that it divides by"
    usual, _ = LaCT.parallel(LaCT(DIM, chunk=CHUNK), memory.initial_state(3), tokens)
    assert distance(usual[:, 0], found) > 1e-2
