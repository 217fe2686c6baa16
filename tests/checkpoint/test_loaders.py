"""Who loads a converted folder, by whatever means transformers has, gets the converted model, or one
sentence."""

import copy
import io
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME, build
from models import CHUNK, LAYERS, converted, distance, logits, random_ids, turn_writer_on
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    LlamaForSequenceClassification,
    PreTrainedModel,
    pipeline,
)

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, save_adapter
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import config_of, fast_weights, is_converted

IDS = random_ids(2, 4 * CHUNK + 2)
NAMES = ["llama", "gemma3", "gpt2", "moshi", "opt"]


def make(name: str) -> PreTrainedModel:
    if name in BY_NAME:
        return converted(name)
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    model = convert(
        transformers.OPTForCausalLM(config).eval(), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK)
    )
    turn_writer_on(model)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Folder and model of each family."""
    made = {name: (tmp_path_factory.mktemp(name), make(name)) for name in NAMES}
    for folder, model in made.values():
        model.save_pretrained(folder)
    return made


def architecture(folder: Path) -> Any:
    """As TRL, pipelines and `transformers serve` find a folder's class."""
    return getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])


LOADERS: dict[str, Callable[[Path, PreTrainedModel], Any]] = {
    "Auto class": lambda folder, model: AutoModelForCausalLM.from_pretrained(folder),
    "path as keyword": lambda folder, model: AutoModelForCausalLM.from_pretrained(
        pretrained_model_name_or_path=folder
    ),
    "the architecture's name": lambda folder, model: architecture(folder).from_pretrained(folder),
    "its path as keyword": lambda folder, model: architecture(folder).from_pretrained(
        pretrained_model_name_or_path=str(folder)
    ),
    "config and state dict": lambda folder, model: architecture(folder).from_pretrained(
        None, config=AutoConfig.from_pretrained(folder), state_dict=model.state_dict()
    ),
    "the loaded model's class": lambda folder, model: type(
        AutoModelForCausalLM.from_pretrained(folder)
    ).from_pretrained(folder),
    "a config made again": lambda folder, model: AutoModelForCausalLM.from_pretrained(
        folder, config=(c := AutoConfig.from_pretrained(folder)) and type(c)(**c.to_dict())
    ),
    "the config's own class": lambda folder, model: AutoModelForCausalLM.from_pretrained(
        folder, config=type(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    ),
    "a pickle of the loaded model": lambda folder, model: pickled(
        AutoModelForCausalLM.from_pretrained(folder)
    ),
    "a pickle of the converted model": lambda folder, model: pickled(model),
    "a deep copy": lambda folder, model: copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder)),
    "saved again": lambda folder, model: saved_again(
        AutoModelForCausalLM.from_pretrained(folder), folder / "again"
    ),
}


def pickled(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_again(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loader", LOADERS)
def test_what_loads_is_the_converted_model(
    loader: str, name: str, saved: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    folder, model = saved[name]
    loaded = LOADERS[loader](folder, model)
    assert config_of(loaded) == config_of(model) and loaded.config.model_type == model.config.model_type
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


@pytest.mark.parametrize("name", NAMES)
def test_a_class_of_the_base_refuses_the_folder(
    name: str, saved: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    folder, model = saved[name]
    base = getattr(transformers, type(model).__name__)
    for refuse in (
        base.from_pretrained,
        type(build("llama").config).from_pretrained,
        base.config_class.from_pretrained,
    ):
        with pytest.raises(
            Exception, match=r"In-Place TTT checkpoint.*import inplace_ttt .*and load it with"
        ):
            refuse(folder)


def test_a_class_of_the_base_refuses_without_the_package(
    saved: dict[str, tuple[Path, PreTrainedModel]],
) -> None:
    folder, _ = saved["llama"]
    code = f"""import sys, transformers
try:
    transformers.LlamaForCausalLM.from_pretrained({str(folder)!r})
except Exception as error:
    print("inplace_ttt" in sys.modules, error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.returncode == 0
        and done.stdout.startswith("False ")
        and "this is an In-Place TTT checkpoint" in done.stdout
    )


def test_the_base_may_have_layer_types_of_its_own(saved: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, model = saved["gemma3"]
    assert "sliding_attention" in AutoConfig.from_pretrained(folder).layer_types == model.config.layer_types


def test_layer_types_that_a_user_sets_hold(saved: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """Whoever makes a config from another's values may change them."""
    config = AutoConfig.from_pretrained(saved["gemma3"][0])
    values = config.to_dict() | {"layer_types": ["full_attention"] * 3}
    assert type(config)(**values).layer_types == values.pop("layer_types") != config.layer_types
    assert (
        type(config)(**values).layer_types == transformers.Gemma3TextConfig(num_hidden_layers=3).layer_types
    )


def test_a_folder_of_the_version_before_loads(
    saved: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    """Its config.json names the base's class, and its layer_types are the base's."""
    folder, model = saved["gemma3"]
    model.save_pretrained(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    section = values["inplace_ttt"]
    before = {**values, "architectures": [type(model).__name__], "layer_types": section.pop("layer_types")}
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), logits(model, IDS))


@pytest.mark.parametrize(
    "auto", [AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
def test_other_heads_stand_on_the_converted_decoder(
    auto: Any, saved: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    folder, model = saved["llama"]
    loaded = auto.from_pretrained(folder)
    assert list(fast_weights(loaded)) == list(fast_weights(model))
    decoder = loaded if auto is AutoModel else loaded.base_model
    with torch.no_grad():
        assert torch.equal(
            decoder(IDS, use_cache=False).last_hidden_state,
            model.model(IDS, use_cache=False).last_hidden_state,
        )


def test_a_classifier_converts_saves_and_loads(tmp_path: Path) -> None:
    plain = build("llama").config.to_dict() | {"num_labels": 3, "problem_type": "single_label_classification"}
    model = convert(
        LlamaForSequenceClassification(transformers.LlamaConfig(**plain)).eval(),
        InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK),
    )
    turn_writer_on(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert is_converted(loaded) and loaded.config.problem_type == "single_label_classification"
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded(IDS, labels=torch.tensor([0, 2]), use_cache=False).loss.backward()


@pytest.mark.parametrize("preset", ["paper", "ridge"])
def test_made_on_the_meta_device_it_starts_as_made_at_once(preset: str) -> None:
    """As one does to make a large model where its shards will be; what is set already stays as it is."""
    made = AutoModelForCausalLM.from_config(
        convert(build("llama"), InPlaceTTTConfig.preset(preset, layers=LAYERS)).config
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(made.config)
    empty.to_empty(device="cpu")
    for tensor in empty.state_dict().values():
        tensor.fill_(torch.nan)
    empty.init_weights()
    for index, layer in fast_weights(made).items():
        started = fast_weights(empty)[index].ttt.state_dict()
        assert all(torch.equal(started[name], tensor) for name, tensor in layer.ttt.state_dict().items())
    turn_writer_on(empty)
    trained = {name: tensor.clone() for name, tensor in empty.state_dict().items()}
    empty.init_weights()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in empty.state_dict().items())


def test_a_filled_cache_can_be_pickled() -> None:
    model, cache = converted("llama"), DynamicCache(config=build("llama").config)
    logits(model, IDS[:, :16], **{CACHE: cache}, use_cache=True)
    again = pickle.loads(pickle.dumps(pickled(cache)))
    assert (
        distance(logits(model, IDS[:, 16:], **{CACHE: again}, use_cache=True), logits(model, IDS)[:, 16:])
        < 5e-5
    )


@pytest.mark.parametrize("exit_after", [1, 2])
def test_early_exits_as_an_assistant_change_no_token(exit_after: int) -> None:
    model = converted("llama")
    asked: dict[str, Any] = {"max_new_tokens": 3 * CHUNK, "do_sample": False, "eos_token_id": -1}
    expected = model.generate(IDS[:1], **asked)
    assert torch.equal(model.generate(IDS[:1], assistant_early_exit=exit_after, **asked), expected)
    assert torch.equal(model.generate(IDS[:1], **asked), expected)


def test_a_pipeline_takes_the_folder(saved: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, model = saved["llama"]
    made = pipeline("text-generation", model=str(folder), tokenizer=_words())
    assert torch.equal(logits(made.model, IDS), logits(model, IDS))


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """An adapter folder, and the converted model that was saved as this adapter."""
    build("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = convert(base, InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK)).eval()
    turn_writer_on(model)
    save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter", model


def test_an_auto_class_takes_an_adapter_folder(adapter: tuple[Path, PreTrainedModel]) -> None:
    folder, model = adapter
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not loaded.training and torch.equal(logits(loaded, IDS), logits(model, IDS))
    asked = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", use_cache=False
    )
    assert asked.dtype == torch.float64 and asked.config._attn_implementation == "eager"
    assert asked.config.use_cache is False
    made = pipeline("text-generation", model=str(folder), tokenizer=_words())
    assert torch.equal(logits(made.model, IDS), logits(model, IDS))


def test_an_adapter_folder_that_cannot_be_loaded_is_refused(adapter: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = adapter
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForTokenClassification.from_pretrained(folder)
    (folder.parent / "base").rename(folder.parent / "moved")
    with pytest.raises(InPlaceTTTError, match="which does not exist"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.full
def test_a_process_without_the_import_is_asked_for_it(adapter: tuple[Path, PreTrainedModel]) -> None:
    """It loads the adapter with `trust_remote_code=True`, and refuses without."""
    folder, model = adapter
    torch.save(logits(model, IDS), folder.parent / "logits")
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[2] == 'yes')\n"
        "known = torch.load(sys.argv[1] + '/../logits')\n"
        f"ids = torch.tensor({IDS.tolist()})\n"
        "with torch.no_grad(): assert torch.equal(model(ids, use_cache=False).logits, known)\n"
    )

    def run(trust: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(folder), trust]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    assert (done := run("yes")).returncode == 0, done.stderr[-2000:]
    assert (done := run("no")).returncode == 1 and "trust_remote_code=True" in done.stderr


def test_pushed_to_the_hub_it_is_the_same_model(
    saved: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own `push_to_hub`, up to the upload, whose files are loaded again."""
    _, model = saved["llama"]

    def upload(self: Any, working_dir: str, *args: Any, **kwargs: Any) -> None:
        shutil.copytree(working_dir, tmp_path / "hub")

    hub = SimpleNamespace(create_repo=lambda name, **how: SimpleNamespace(repo_id=name))
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: hub)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    model.push_to_hub("somebody/llama-ttt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def _words() -> Any:
    import tiny

    return tiny.byte_level()
