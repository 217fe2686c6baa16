"""NeMo Automodel with the YAML of docs/clients.md: what of its recipe does not ask for CUDA, on a real
model."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.surgery import fast_weights

pytest.importorskip("nemo_automodel", reason="Automodel is not installed here; `make test-clients` does it")

from nemo_automodel._transformers.infrastructure import (
    MeshContext,
    apply_model_infrastructure,
    instantiate_infrastructure,
)
from nemo_automodel.components.config.loader import load_yaml_config, set_enable_user_modules
from nemo_automodel.recipes._typed_config import RecipeConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's, read by Automodel, in a folder that has the model."""
    monkeypatch.chdir(tmp_path)
    set_enable_user_modules(True)
    tiny.save_llama(tmp_path / "smollm2-135m", tiny.byte_level(), num_hidden_layers=7, num_attention_heads=2)
    (page,) = (
        text
        for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        if "_target_" in text
    )
    Path("automodel.yaml").write_text(page)
    return load_yaml_config("automodel.yaml")


def with_infrastructure(model: torch.nn.Module) -> torch.nn.Module:
    """As its recipe does for models of other builders, on the CPU."""
    mesh, device = MeshContext(), torch.device("cpu")
    wrapper, pipeline, parallelize, quantizer = instantiate_infrastructure(
        distributed_config=None, device=device, mesh=mesh
    )
    return apply_model_infrastructure(
        model,
        is_meta_device=False,
        device=device,
        mesh=mesh,
        model_wrapper=wrapper,
        autopipeline=pipeline,
        parallelize_fn=parallelize,
        qat_quantizer=quantizer,
        pretrained_model_name_or_path=None,
        load_base_model=False,
        cache_dir=str(Path.cwd()),
    )


def test_the_page_trains_for_five_steps(config: Any) -> None:
    """Its model builder, infrastructure, data, optimizer, schedules and loss; its loop alone, which asks for
    CUDA, is written out."""
    typed = RecipeConfig(config)
    model = with_infrastructure(config.model.instantiate()).train()
    assert list(fast_weights(model)) == [0, 6]
    (optimizer,) = typed.optimizer.build(model)
    loader = typed.dataloader.build(
        tokenizer=None,
        dataset_build_context=nullcontext(),
        dp_rank=0,
        dp_world_size=1,
        pp_enabled=False,
        supports_seq_lens=True,
        cp_size=1,
    )
    steps = typed.step_scheduler.build(loader, 1, 2)
    (scheduler,) = typed.lr_scheduler.build([optimizer], steps)
    loss_fn, losses = typed.loss_fn.build(), []
    for batches in steps:
        for batch in batches:
            labels = batch.pop("labels")
            loss = loss_fn(
                model(**batch, use_cache=False).logits, labels, num_label_tokens=int(labels.ne(-100).sum())
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1)
        rates = {
            group.get("lr_mult", 1.0): (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
        }
        assert rates[10][0] == pytest.approx(10 * rates[1.0][0]) and rates[10][1] == 0 < rates[1.0][1]
        losses.append(loss.item())
    assert len(losses) == 5 and losses[-1] < losses[0]
    ttt = {id(p) for layer in fast_weights(model).values() for p in layer.ttt.parameters()}
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == ttt
    # more than five steps at the other rate
    assert all(layer.ttt.conv.abs().max() > 1e-3 for layer in fast_weights(model).values())


def test_wrong_settings_are_refused(config: Any) -> None:
    config.model.ttt.chunk_size = "many"
    with pytest.raises(InPlaceTTTError, match=r"inplace_ttt, ttt\.chunk_size: must be a whole number"):
        config.model.instantiate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what stops its recipe is a machine without CUDA")
def test_its_recipe_needs_cuda(config: Any) -> None:
    """So that docs/clients.md is changed once it does not."""
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    with pytest.raises(AttributeError, match="_cuda_resetPeakMemoryStats"):
        TrainFinetuneRecipeForNextTokenPrediction(config).setup()
