"""FSDP2 shards a converted model as it shards its base, also with bf16 mixed precision, whose input casting copies dataclasses."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import CHUNK, converted, random_ids
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from inplace_ttt.errors import NotSoError
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.guards import FiniteGradients, GradientTap

LENGTH, STEPS = 4 * CHUNK + 2, 4
PRECISION = {
    "float32": (MixedPrecisionPolicy(), 1e-5),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 0.02),  # against float32
}


def two_are_one(group: dist.ProcessGroup, precision: str) -> None:
    policy, tolerance = PRECISION[precision]
    rank, mesh = dist.get_rank(group), init_device_mesh("cpu", (2,))
    whole, sharded = converted("llama").train(), converted("llama").train()
    for block in sharded.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    both = [(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) for model in (whole, sharded)]
    for step in range(STEPS):
        ids, losses = random_ids(2, LENGTH, seed=step), []
        for (model, optimiser), rows in zip(both, (ids, ids[rank : rank + 1]), strict=True):
            loss = model(rows, labels=rows, use_cache=False).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / 2, losses[0], rtol=tolerance, atol=0)


@pytest.mark.parametrize("precision", list(PRECISION))
def test_two_processes_train_as_one(precision: str) -> None:
    on_ranks(2, two_are_one, precision)


def tapped_shards(group: dist.ProcessGroup) -> None:
    """FSDP2 puts a parameter's gradient in place past its hooks: the tap then reads the shards, whose squares add up to the whole's."""
    rank, mesh = dist.get_rank(group), init_device_mesh("cpu", (2,))
    whole, sharded = converted("llama").train(), converted("llama").train()
    for block in sharded.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    taps, rows = [GradientTap(model) for model in (whole, sharded)], random_ids(2, LENGTH)
    for model, tap, ids in zip((whole, sharded), taps, (rows, rows[rank : rank + 1]), strict=True):
        model(ids, labels=ids, use_cache=False).loss.backward()
        tap.look()
    expected, found = (tap.read() for tap in taps)
    assert found.keys() == expected.keys()
    for index, norms in expected.items():
        shards = torch.tensor([found[index][name] ** 2 for name in norms])
        dist.all_reduce(shards)
        torch.testing.assert_close(shards.sqrt(), torch.tensor(list(norms.values())), rtol=1e-4, atol=1e-7)
    guard, args, state = FiniteGradients(taps[1]), SimpleNamespace(fp16=False, device="cpu"), SimpleNamespace(global_step=0)
    guard.on_pre_optimizer_step(args, state, None)
    if rank == 1:  # one rank's row alone
        fast_weights(sharded)[0].ttt.conv.grad.to_local()[:] = float("nan")
    with pytest.raises(NotSoError, match="not finite at step 1"):
        guard.on_pre_optimizer_step(args, state, None)


def test_the_guards_see_what_is_sharded() -> None:
    on_ranks(2, tapped_shards)
