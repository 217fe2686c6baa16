"""FSDP2 trains a converted model as one process does, in float32 and with bf16 mixed precision, and what it
saves loads."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import CHUNK, RIDGE, converted, random_ids
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from inplace_ttt.errors import NotSoError
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.loop.guards import FiniteGradients, GradientTap

LENGTH, STEPS = 4 * CHUNK + 2, 10
RULES = {"paper": {}, "ridge": RIDGE}
PRECISION = {
    "float32": (MixedPrecisionPolicy(), 1e-5),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 1e-3),
}
"""And how far a loss may be from one process's, relatively."""


def sharded(rule: str, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    model = converted("llama", **RULES[rule]).train()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train_alike(
    whole: nn.Module, split: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rtol: float
) -> None:
    """Two rows here, one after the other, and one of them on each rank: at every step the mean of their
    losses is the same."""
    for step in range(STEPS):
        rows, losses = random_ids(2, LENGTH, seed=step).split(1), []
        for model, optimizer, mine in zip(
            (whole, split), optimizers, (rows, rows[dist.get_rank() :][:1]), strict=True
        ):
            of_rows = [model(row, labels=row, use_cache=False).loss / len(mine) for row in mine]
            for loss in of_rows:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(of_rows).detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / 2, losses[0], rtol=rtol, atol=0)


def two_are_one(group: dist.ProcessGroup, rule: str, precision: str, recomputed: bool, folder: Path) -> None:
    policy, rtol = PRECISION[precision]
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))
    whole, split = sharded(rule, meshes["alone"], policy), sharded(rule, meshes["both"], policy)
    if recomputed:
        split.gradient_checkpointing_enable({"use_reentrant": False})
    train_alike(
        whole, split, [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (whole, split)], rtol
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors = get_model_state_dict(split, options=options)
    if dist.get_rank() == 0:
        split.save_pretrained(folder, state_dict=dict(tensors))
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == tensors.keys(), loaded.keys() ^ tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "precision", "recomputed"),
    [
        ("paper", "float32", False),
        ("paper", "bfloat16", True),
        ("ridge", "float32", True),
        ("ridge", "bfloat16", False),
    ],
)
def test_two_processes_train_as_one(rule: str, precision: str, recomputed: bool, tmp_path: Path) -> None:
    on_ranks(2, two_are_one, rule, precision, recomputed, tmp_path / "saved")


def prepared_by_accelerate(group: dist.ProcessGroup, folder: Path) -> None:
    """accelerate leaves FSDP out on a CPU, whatever its launcher is told; what it would do is done here by
    telling it that it is on."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    accelerator = Accelerator(cpu=True)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=True,
        cpu_ram_efficient_loading=False,
    )
    whole, split = converted("llama").train(), converted("llama").train()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (whole, split)]
    split, optimizers[1] = accelerator.prepare(split, optimizers[1])
    assert type(split.model.layers[0]).__name__.startswith("FSDP")
    train_alike(whole, split, optimizers, 1e-5)
    tensors = accelerator.get_state_dict(split)
    if dist.get_rank() == 0:
        accelerator.unwrap_model(split).save_pretrained(folder, state_dict=tensors)
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        torch.testing.assert_close(dict(loaded), dict(whole.state_dict()), rtol=1e-3, atol=1e-5)


def test_accelerate_prepares_it(tmp_path: Path) -> None:
    on_ranks(2, prepared_by_accelerate, tmp_path / "saved")


def tapped_shards(group: dist.ProcessGroup) -> None:
    """FSDP2 puts a parameter's gradient in place past its hooks: the tap then reads the shards, whose squares
    add up to the whole's."""
    rank, mesh = dist.get_rank(group), init_device_mesh("cpu", (2,))
    whole, split = converted("llama").train(), sharded("paper", mesh, MixedPrecisionPolicy())
    taps, rows = [GradientTap(model) for model in (whole, split)], random_ids(2, LENGTH)
    for model, tap, ids in zip((whole, split), taps, (rows, rows[rank : rank + 1]), strict=True):
        model(ids, labels=ids, use_cache=False).loss.backward()
        tap.look()
    expected, found = (tap.read() for tap in taps)
    assert found.keys() == expected.keys()
    for index, norms in expected.items():
        shards = torch.tensor([found[index][name] ** 2 for name in norms])
        dist.all_reduce(shards)
        torch.testing.assert_close(shards.sqrt(), torch.tensor(list(norms.values())), rtol=1e-4, atol=1e-7)
    guard, args, state = (
        FiniteGradients(taps[1]),
        SimpleNamespace(fp16=False, device="cpu"),
        SimpleNamespace(global_step=0),
    )
    guard.on_pre_optimizer_step(args, state, None)
    if rank == 1:  # one rank's row alone
        fast_weights(split)[0].ttt.conv.grad.to_local()[:] = float("nan")
    with pytest.raises(NotSoError, match="not finite at step 1"):
        guard.on_pre_optimizer_step(args, state, None)


def test_the_guards_see_what_is_sharded() -> None:
    on_ranks(2, tapped_shards)
