"""Mistakes in a recipe, in its file and in overrides: each is answered with its line and key."""

from pathlib import Path

import pytest

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipe_texts import RECIPE, changed, refused


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (changed("  steps: 3", "  steps: [3"), "recipe.yaml line", "is not YAML"),
        ("just words", "recipe.yaml", "is not a table of settings"),
        ("", "recipe.yaml", "is not a table of settings"),
        (
            changed("  steps: 3", "  steps: 3\n  stepz: 4"),
            "line 10, training.stepz",
            "unknown setting; known here: trainable, steps",
        ),
        (
            changed("output: out", "outputs: out"),
            "line 10, outputs",
            "unknown setting; known here: model, data",
        ),
        (changed("output: out\n", ""), "recipe.yaml, output", "this setting is missing"),
        (changed("training:\n  steps: 3\n", ""), "recipe.yaml, training", "this setting is missing"),
        (
            changed("model:\n  path: somewhere\n", "model: somewhere\n"),
            "line 1, model",
            "must be a table of settings, got 'somewhere'",
        ),
        (
            changed("  steps: 3", "  steps: many"),
            "line 9, training.steps",
            "must be a whole number or nothing, got 'many'",
        ),
        (
            changed("  steps: 3", "  steps: 3.5"),
            "line 9, training.steps",
            "must be a whole number or nothing, got 3.5",
        ),
        (
            changed("  steps: 3", "  steps: .inf"),
            "line 9, training.steps",
            "must be a whole number or nothing, got inf",
        ),
        (
            changed("  steps: 3", "  steps: true"),
            "line 9, training.steps",
            "must be a whole number or nothing, got True",
        ),
        (changed("  steps: 3", "  steps: 0"), "line 9, training.steps", "must be at least 1"),
        (
            changed("  steps: 3", "  steps: 1:30"),
            "line 9, training.steps",
            "must be a whole number or nothing, got '1:30'",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  learning_rate: 1:30.5"),
            "line 10, training.learning_rate",
            "a number, got '1:30.5'",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  tokens: 5"),
            "line 9, training.steps",
            "give either steps or tokens",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  steps: 4"),
            "line 10, training.steps",
            "the key appears twice",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  learning_rate: high"),
            "line 10, training.learning_rate",
            "must be a number, got 'high'",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  learning_rate: .nan"),
            "line 10, training.learning_rate",
            "must be a number",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  learning_rate: 0"),
            "line 10, training.learning_rate",
            "must be above 0",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  trainable: some"),
            "line 10, training.trainable",
            "must be one of all, ttt, lora, got 'some'",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  liger: 1"),
            "line 10, training.liger",
            "must be true or false, got 1",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  betas: [0.9]"),
            "line 10, training.betas",
            "must be two numbers",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  betas: [0.9, x]"),
            "line 10, training.betas.1",
            "must be a number, got 'x'",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  lora: {rank: 2}"),
            "line 10, training.lora",
            "does nothing without trainable: lora",
        ),
        (
            changed("  steps: 3", "  steps: 3\n  trainable: lora\n  lora: {rnk: 2}"),
            "line 11, training.lora.rnk",
            "known here: rank, alpha",
        ),
        (
            changed("chunk_size: 16", "chunk_size: 0"),
            "line 3, ttt",
            "chunk_size must be an integer of at least 1, got 0",
        ),
        (
            changed("chunk_size: 16", "chunksize: 16"),
            "line 4, ttt.chunksize",
            "unknown setting; known here: preset, layers",
        ),
        (
            changed("chunk_size: 16", "chunk_size: many"),
            "line 4, ttt.chunk_size",
            "must be a whole number, got 'many'",
        ),
        (
            changed("chunk_size: 16", "target: words"),
            "line 4, ttt.target",
            "must be one of embeddings, hidden_states, gradient, got 'words'",
        ),
        (changed("chunk_size: 16", "clip: {}"), "line 4, ttt.clip.max_norm", "this setting is missing"),
        (
            changed("chunk_size: 16", "clip: {max_norm: -1}"),
            "line 4, ttt.clip",
            "max_norm must be a number above 0, got -1.0",
        ),
        (
            changed("chunk_size: 16", "layers: [0, x]"),
            "line 4, ttt.layers",
            "must be text or a list (a whole number), got",
        ),
        (changed("chunk_size: 16", "preset: best"), "line 3, ttt", "preset 'best' does not exist"),
        (
            changed("  path: somewhere", "  path: somewhere\n  config: {model_type: llama}"),
            "line 2, model.path",
            "give either path or config",
        ),
        (
            changed("  path: somewhere", "  config: {hidden_size: 8}"),
            "line 2, model.config",
            "config needs model_type",
        ),
        (
            changed("  path: somewhere", "  config: {model_type: llama}"),
            "line 1, model",
            "from scratch needs a tokenizer",
        ),
        (changed("  train: book.txt", "  train: []"), "line 6, data.train", "name at least one file"),
        (
            changed("output: out", "output: out\ndeepspeed: 4"),
            "line 11, deepspeed",
            "ZeRO stage 4 does not exist",
        ),
        (
            changed("output: out", "output: out\ndeepspeed: zero9.json"),
            "line 11, deepspeed",
            "zero9.json: No such file",
        ),
        (
            changed("output: out", "output: out\nparallel: {sequence_parallel_size: 2}"),
            "line 11, parallel.sequence_parallel_size",
            "2 does not divide 1 processes",
        ),
        (
            changed("output: out", "output: out\nparallel: {nproc_per_node: 4, sequence_parallel_size: 3}"),
            "line 11, parallel.sequence_parallel_size",
            "3 does not divide 4 processes",
        ),
        (
            changed("sequence_length: 64", "sequence_length: 65")
            + "parallel: {nproc_per_node: 2, sequence_parallel_size: 2}\n",
            "line 5, data",
            "sequence_length 65 is not divisible by 2 ranks",
        ),
        (
            changed(
                "output: out",
                "output: out\ndeepspeed: 0\nparallel: {nproc_per_node: 2, sequence_parallel_size: 2}",
            ),
            "line 11, deepspeed",
            "sequence_parallel_size above 1 needs ZeRO stage 1, 2 or 3",
        ),
    ],
)
def test_mistakes_are_named_with_line_and_key(text: str, where: str, what: str, tmp_path: Path) -> None:
    message = refused(tmp_path, text)
    assert where in message and what in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=r"cannot read .*nowhere.yaml: No such file"):
        load_recipe(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InPlaceTTTError, match="is not UTF-8 text"):
        load_recipe(tmp_path / "binary.yaml")
    (tmp_path / "broken.json").write_text("{")
    assert "is not JSON" in refused(tmp_path, RECIPE + "deepspeed: broken.json\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "--set training.steps: write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("training..steps=3", "write it as section.key=value"),
        ("training.steps=[", "--set training.steps=[: '[' is not a YAML value"),
        ("training.steps=x", "--set, training.steps: must be a whole number"),
        ("ttt.chunks=1", "--set, ttt.chunks: unknown setting"),
        ("ttt.eta=-1", "recipe.yaml line 3, ttt: eta must be a number of at least 0"),
        ("training.stepz=1", "--set, training.stepz: unknown setting"),
        (
            "parallel.sequence_parallel_size=2",
            "--set, parallel.sequence_parallel_size: 2 does not divide 1 processes",
        ),
        ("output.folder=x", "--set output.folder=x: output is not a section"),
    ],
)
def test_wrong_overrides(override: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, RECIPE, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("monitor.eval_steps=2", "monitor: eval_steps needs held-out documents; set data.validation"),
        ("monitor.stop_write_ratio=0", "monitor.stop_write_ratio: must be above 0"),
        ("training.ttt_warmup_steps=-5", "training.ttt_warmup_steps: must be at least 0"),
        (
            "training={steps: 1, lr_scheduler: constant, min_lr_ratio: 0.5}",
            "min_lr_ratio: does nothing with lr_scheduler: constant",
        ),
        (
            "audit={profile: null, deviations: [{id: a, why: b}]}",
            "audit.deviations: do nothing without a profile",
        ),
        ("data={recall: {}, validation: [a.txt]}", "data.validation: does nothing with recall"),
        ("data={recall: {}, streaming: true}", "data.streaming: does nothing with recall"),
        ("rank: 0", "lora.rank: must be at least 1"),
        ("rank: 100000000", "lora.rank: must be at most 4,096"),
        ("alpha: 0", "lora.alpha: must be above 0"),
        ("alpha: -1", "lora.alpha: must be above 0"),
        ("dropout: 5", "lora.dropout: must be at least 0 and below 1"),
        ("dropout: -1", "lora.dropout: must be at least 0 and below 1"),
        ("targets: []", "lora.targets: must name modules"),
        ("targets: ['']", "lora.targets: must name modules"),
        ("targets: ''", "lora.targets: must name modules"),
        ("targets: '['", "lora.targets: '[' is not a regular expression: unterminated character set"),
    ],
)
def test_settings_that_cannot_be_or_have_no_effect(override: str, message: str, tmp_path: Path) -> None:
    lora = "=" not in override
    assert message in refused(
        tmp_path,
        RECIPE,
        f"training={{steps: 1, trainable: lora, lora: {{{override}}}}}" if lora else override,
    )
