"""FSDP2 shards a converted model as it shards its base, also with bf16 mixed precision, whose input casting copies dataclasses."""

import pytest
import torch
import torch.distributed as dist
from models import CHUNK, converted, random_ids
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
