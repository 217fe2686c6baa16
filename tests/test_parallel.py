"""A model whose rows lie across ranks, outside a trainer; and what is refused there."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import converted, random_ids
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layer.sequence_parallel import gather_rows
from inplace_ttt.surgery import fast_weights, share_sequence
from inplace_ttt.training.ulysses import document_mask

# documents on the grid of 7, across the borders of 2 and 4 ranks
PACKED = [[*range(35), *range(7), *range(14)], [*range(56)]]


def rows() -> tuple[Tensor, Tensor]:
    return random_ids(2, 56), torch.tensor(PACKED)


def attention_across(group: dist.ProcessGroup) -> Any:
    """sdpa whose queries are this rank's and whose keys are everyone's."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def everyone(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        width = query.shape[2]
        mask = document_mask(gather_rows(kwargs["position_ids"], group), None)
        assert mask is not None
        return sdpa_attention_forward(
            module,
            query,
            everyone(key),
            everyone(value),
            mask[:, :, rank * width : (rank + 1) * width],
            **kwargs,
        )

    return forward


def one_model(group: dist.ProcessGroup) -> None:
    ids, positions = rows()
    model = converted("llama").eval()
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        rank, width = dist.get_rank(group), 56 // dist.get_world_size(group)
        mine = slice(rank * width, (rank + 1) * width)
        AttentionInterface.register("sdpa", attention_across(group))
        with share_sequence(model, group), ThreadPoolExecutor(1) as another:
            assert another.submit(lambda: fast_weights(model)[0].hooks.model.group).result() is None
            found = model(input_ids=ids[:, mine], position_ids=positions[:, mine], use_cache=False).logits
            torch.testing.assert_close(found, expected[:, mine], rtol=1e-4, atol=1e-4)
            refusals(model, ids[:, mine], positions[:, mine])


def refusals(model: Any, ids: Tensor, positions: Tensor) -> None:
    with pytest.raises(InPlaceTTTError, match="a cache cannot be shared by the ranks"):
        model(input_ids=ids, position_ids=positions)
    hides = torch.ones_like(ids)
    hides[:, 0] = 0
    with pytest.raises(InPlaceTTTError, match="show their documents by position_ids alone"):
        model(input_ids=ids, position_ids=positions, attention_mask=hides, use_cache=False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_rows_give_the_logits_of_one(ranks: int) -> None:
    on_ranks(ranks, one_model)


def torch_context_parallel(group: dist.ProcessGroup) -> None:
    model, ids = converted("llama").train(), random_ids(1, 56)
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    with (
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
        pytest.raises(InPlaceTTTError, match="torch's context parallelism"),
    ):
        model(input_ids=ids, use_cache=False)
    model(input_ids=ids, use_cache=False)  # and not after it


def test_torchs_context_parallelism_is_refused() -> None:
    on_ranks(1, torch_context_parallel)
