"""TTT-Linear and TTT-MLP: Theorem 1, and the mini-batch as the paper writes it."""

import torch
import torch.nn.functional as F
from models import distance

from inplace_ttt.memories import TTTMLP, LinearAttention, TTTLinear
from memories.systems import DIM, inputs, randomise


def test_theorem_1() -> None:
    """A linear f, batch gradient descent, η = 1/2 and W0 = 0 is linear attention (arXiv 2407.04620, Theorem 1)."""
    x = inputs(41)
    for heads in (1, 2):
        ttt = TTTLinear(DIM, heads, mini_batch=41, eta_base=0.5, learnt_rate=False, residual_norm=False).double()
        attention = LinearAttention(DIM, heads, chunk=7).double()
        randomise(ttt)
        attention.load_state_dict({name: p for name, p in ttt.state_dict().items() if name.startswith("to_")})
        torch.nn.init.zeros_(ttt.initial[0])
        for form in (ttt, ttt.primal):
            y, state = form(x)
            expected, s = attention(x)
            assert distance(y, expected) < 1e-10 and distance(state.now[0], s) < 1e-10
        mini_batch = TTTLinear(DIM, heads, mini_batch=20, eta_base=0.5, learnt_rate=False, residual_norm=False).double()
        mini_batch.load_state_dict(ttt.state_dict())
        assert distance(mini_batch(x)[0], expected) > 1e-3  # online it is not


def test_mini_batches_by_hand() -> None:
    """One head, no batch: G_t at the last mini-batch's end, W_t = W_{t−1} − η_t G_t, z_t = f(θ_Q x_t; W_t)."""
    memory, x = TTTLinear(DIM, mini_batch=4, eta_base=0.7).double(), inputs(10, batch=1)
    randomise(memory)
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
