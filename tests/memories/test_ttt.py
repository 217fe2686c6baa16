"""TTT-Linear and TTT-MLP: Theorem 1, the mini-batch as the paper writes it, and the public code's form."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from audit.public_classes import classes
from models import distance

from inplace_ttt.memories import TTTMLP, LinearAttention, TTTLinear
from memories.systems import CHUNK, DIM, inputs, randomize


def test_theorem_1() -> None:
    """A linear f, batch gradient descent, η = 1/2 and W0 = 0 is linear attention (arXiv 2407.04620, Theorem
    1)."""
    x = inputs(41)
    for heads in (1, 2):
        ttt = TTTLinear(
            DIM, heads, mini_batch=41, eta_base=0.5, learned_rate=False, residual_norm=False
        ).double()
        attention = LinearAttention(DIM, heads, chunk=7).double()
        randomize(ttt)
        attention.load_state_dict({name: p for name, p in ttt.state_dict().items() if name.startswith("to_")})
        torch.nn.init.zeros_(ttt.initial[0])
        for form in (ttt, ttt.primal):
            y, state = form(x)
            expected, s = attention(x)
            assert distance(y, expected) < 1e-10 and distance(ttt.now(state)[0], s) < 1e-10
        mini_batch = TTTLinear(
            DIM, heads, mini_batch=20, eta_base=0.5, learned_rate=False, residual_norm=False
        ).double()
        mini_batch.load_state_dict(ttt.state_dict())
        assert distance(mini_batch(x)[0], expected) > 1e-3  # online it is not


def test_mini_batches_by_hand() -> None:
    """One head, no batch: G_t at the last mini-batch's end, W_t = W_{t−1} − η_t G_t, z_t = f(θ_Q x_t;
    W_t)."""
    memory, x = TTTLinear(DIM, mini_batch=4, eta_base=0.7).double(), inputs(10, batch=1)
    randomize(memory)
    gamma, beta = (p[0, 0] for p in memory.norm)
    q, k, v = (project(x[0]) for project in (memory.to_q, memory.to_k, memory.to_v))
    eta = 0.7 * memory.to_rate(x[0]).sigmoid()[:, 0]
    w = start = memory.initial[0][0]
    read = []
    for t in range(10):
        if t % 4 == 0:
            start = w
        leaf = start.detach().requires_grad_()
        loss = (k[t] + F.layer_norm(leaf @ k[t], (DIM,), gamma, beta, 1e-6) - v[t]).square().sum()
        w = w - eta[t] * torch.autograd.grad(loss, leaf)[0].detach()
        read.append(q[t] + F.layer_norm(w @ q[t], (DIM,), gamma, beta, 1e-6))
    assert distance(memory(x)[0][0], memory.to_out(torch.stack(read))) < 1e-12


def test_a_fresh_memory_learns_what_it_reads() -> None:
    """Updates bring f(k) nearer to v: the same tokens, read again, lose less each time."""
    for memory in (TTTLinear(DIM, 2), TTTMLP(DIM, 2)):
        memory.double()
        x, state, losses = inputs(16), None, []
        for _ in range(4):
            _, state = memory(x, state)
            tokens = memory.tokens(x)
            losses.append(memory.loss(memory.query(state, tokens.k), tokens.v).sum().item())
        assert losses == sorted(losses, reverse=True), type(memory).__name__


def test_the_public_form_by_hand() -> None:
    """One head: q and k turned by their place, steps over 2d, scaled anew for each reader, biases, a norm
    before the output."""
    memory, x = TTTLinear(DIM, mini_batch=4, eta_base=9.0, form="public").double(), inputs(10, batch=1)
    randomize(memory)
    torch.nn.init.constant_(memory.learned_scale[-1], -1.0)  # a reader that sees none of its mini-batch
    gamma, beta = (p[0, 0] for p in memory.norm)
    q, k, v = (project(x[0]) for project in (memory.to_q, memory.to_k, memory.to_v))
    eta = 9.0 * memory.to_rate(x[0]).sigmoid()[:, 0] / (2 * DIM)
    scale = (1 / torch.arange(1.0, 5.0, dtype=torch.float64) + memory.learned_scale).clamp(min=0)
    assert (scale == 0).any() and (scale > 0).any()

    def turned(token: torch.Tensor, place: int) -> torch.Tensor:
        frequency = torch.tensor([10_000 ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)
        return torch.view_as_real(
            torch.view_as_complex(token.reshape(-1, 2)) * torch.exp(1j * place * frequency)
        ).flatten()

    def f(token: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return token + F.layer_norm(w @ token + b, (DIM,), gamma, beta, 1e-6)

    w, b = start = memory.initial[0][0, :, :-1], memory.initial[0][0, :, -1]
    read = []
    for t in range(10):
        place = t % 4
        if place == 0:
            start, total = (w, b), (torch.zeros_like(w), torch.zeros_like(b))
        leaves = [part.detach().requires_grad_() for part in start]
        loss = (f(turned(k[t], place), *leaves) - v[t]).square().sum()
        total = tuple(
            sum_ + eta[t] * g for sum_, g in zip(total, torch.autograd.grad(loss, leaves), strict=True)
        )
        w, b = (part - scale[place] * moved for part, moved in zip(start, total, strict=True))
        read.append(f(turned(q[t], place), w, b))
    y = F.layer_norm(torch.stack(read), (DIM,), memory.read_norm.weight, memory.read_norm.bias, 1e-6)
    assert distance(memory(x)[0][0], memory.to_out(y)) < 1e-12


@pytest.mark.parametrize("memory", [TTTLinear, TTTMLP])
def test_the_public_form_is_the_public_layer(memory: type[TTTLinear | TTTMLP]) -> None:
    """Outputs and every gradient of the public code's class with the same parameters, a last mini-batch left
    open."""
    heads, eta_base, length = 2, 4.0, 3 * CHUNK + 2
    functions = (
        "rotate_half",
        "permute_qk",
        "undo_permute_qk",
        "apply_rotary_pos_emb",
        "scan",
        "ln_fwd",
        "ln_fused_l2_bwd",
        "gelu_bwd",
    )
    public = classes("ttt/ttt.py", *functions, "RotaryEmbedding", "TTTBase", memory.__name__)[memory.__name__]
    size = {
        "hidden_size": DIM,
        "num_attention_heads": heads,
        "mini_batch_size": CHUNK,
        "rope_theta": 10_000.0,
    }
    options = {"share_qk": False, "conv_kernel": 4, "use_gate": False, "scan_checkpoint_group_size": 0}
    theirs = public(SimpleNamespace(**size, **options, ttt_base_lr=eta_base), layer_idx=0).double()
    randomize(theirs)
    ours = memory(DIM, heads, CHUNK, eta_base, form="public").double()
    first, every, of_heads = (slice(None), 0), Ellipsis, (slice(None), None)
    pairs = [
        *(
            (getattr(ours, f"to_{name}").weight, getattr(theirs, f"{name[0]}_proj").weight, every)
            for name in ("q", "k", "v", "out")
        ),
        (ours.to_rate.weight, theirs.learnable_ttt_lr_weight, first),
        (ours.to_rate.bias, theirs.learnable_ttt_lr_bias, first),
        (ours.norm[0], theirs.ttt_norm_weight, of_heads),
        (ours.norm[1], theirs.ttt_norm_bias, of_heads),
        (ours.learned_scale, theirs.learnable_token_idx, every),
        (ours.read_norm.weight, theirs.post_norm.weight, every),
        (ours.read_norm.bias, theirs.post_norm.bias, every),
    ]
    with torch.no_grad():
        for parameter, same, index in pairs:
            parameter.copy_(same[index])
        for number, weight in enumerate(ours.initial, start=1):
            weight.copy_(torch.cat([getattr(theirs, f"W{number}"), getattr(theirs, f"b{number}")], dim=1).mT)
    x = inputs(length)
    found, expected = ours(x)[0], theirs(x, position_ids=torch.arange(length)[None])
    assert distance(found, expected) < 1e-5
    cotangent = inputs(length, seed=8)
    found.backward(cotangent)
    expected.backward(cotangent)
    for parameter, same, index in pairs:
        assert distance(parameter.grad, same.grad[index]) < 1e-5
    for number, weight in enumerate(ours.initial, start=1):
        same = torch.cat([getattr(theirs, f"W{number}").grad, getattr(theirs, f"b{number}").grad], dim=1).mT
        assert distance(weight.grad, same) < 1e-5
