"""L13: reading with `target: gradient` equals plain gradient steps on a copy of the model, one per chunk,
however the text comes."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from models import NAMES, RIDGE, distance, random_ids
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel, StaticCache

from inplace_ttt import (
    InPlaceTTTConfig,
    InPlaceTTTError,
    Session,
    calibrate,
    convert,
    disable_ttt,
    load,
    revert,
)
from inplace_ttt.checkpoint.to_adapter import save_adapter
from inplace_ttt.families import CACHE, locate
from inplace_ttt.layer.cache import streams
from inplace_ttt.rules import RidgeRule, SumRule
from inplace_ttt.surgery import config_of, fast_weights

LAYERS, CHUNK, LENGTH = (0, 2), 7, 40
SUM: dict[str, Any] = {"eta": 0.3}
SOLVED = {"update_rule": "ridge", "ridge": 0.5, "whitening": RIDGE["whitening"], "eta": 0.3}
RULES = {
    "sum": SUM,
    "ridge": SOLVED,
    "row norms": {**SUM, "preserve_row_norms": True},
    "clip": {"eta": 3.0, "clip": {"max_norm": 0.3}},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}
SPLITS = {
    "whole": [40],
    "chunks": [7] * 5 + [5],
    "tokens": [1] * 40,
    "odd": [3, 10, 2, 25],
    "two chunks": [14, 26],
}


def reading(
    name: str, dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A family, and its conversion."""
    base = build(name).to(dtype).eval()
    settings = {"layers": LAYERS, "chunk_size": CHUNK, "target": "gradient", **(config or SUM)}
    model = convert(copy.deepcopy(base), InPlaceTTTConfig(**settings))
    calibrate(model, [random_ids(1, 64, seed=2)])
    return base, model


def plain_steps(base: PreTrainedModel, model: PreTrainedModel, ids: Tensor, *, graph: bool = False) -> Tensor:
    """Logits [1, T, V] by autograd: a chunk is read with W0 + ηM, then its loss moves the sums that M is made
    of.

    graph: logits keep their graph, through the keys and the KV cache; the targets are constants.
    """
    ttt, cache, logits = fast_weights(model), DynamicCache(config=base.config.get_text_config()), []
    down = {i: locate(base).layers[i].down_proj for i in ttt}
    state: dict[int, Tensor] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def read(i: int) -> Any:
        def hook(module: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
            keys = ttt[i].keys(args[0])
            change = (
                torch.zeros(out.shape[-1], keys.shape[-1]).to(out)
                if i not in state
                else read_of(i, state[i]).to(out)
            )
            out = out + ttt[i].eta * keys @ change.T
            probe = torch.zeros_like(out, requires_grad=True)
            seen[i] = keys if graph else keys.detach(), probe
            return out + probe

        return hook

    def read_of(i: int, sums: Tensor) -> Tensor:
        """M of the sums; solved anew, since the rule's own code keeps no graph."""
        rule = ttt[i].fast.config.rule
        if not isinstance(rule, RidgeRule):
            return ttt[i].readout(sums)
        gram = sums[-sums.shape[1] :] + rule.ridge * torch.eye(sums.shape[1]).to(sums)
        return torch.linalg.solve(gram, sums[: -sums.shape[1]].T).T

    def step(i: int, gradient: Tensor) -> None:
        keys, values = (
            x[0].to(torch.promote_types(x.dtype, torch.float32))
            for x in (seen[i][0], -ttt[i].ttt.gain * gradient)
        )
        delta = values.T @ keys
        clip = ttt[i].tau()
        factor = 1.0 if clip is None else min(1.0, float(clip) / float(delta.norm()))
        rule = ttt[i].fast.config.rule
        step = (
            torch.cat([factor * delta, factor * keys.T @ keys])
            if isinstance(rule, RidgeRule)
            else factor * delta
        )
        state[i] = step + state.get(i, torch.zeros_like(step))

    handles = [module.register_forward_hook(read(i)) for i, module in down.items()]
    for start in range(0, ids.shape[1], CHUNK):
        chunk = ids[:, start : start + CHUNK]
        steps = config_of(model).steps_per_chunk if chunk.shape[1] == CHUNK else 0
        before = copy.deepcopy(cache) if steps > 1 else cache
        out = base(input_ids=chunk, **{CACHE: cache}, use_cache=True).logits
        logits.append(out if graph else out.detach())
        for layer in cache.layers if not graph else []:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        for number in range(steps):
            if number:
                out = base(input_ids=chunk, **{CACHE: copy.deepcopy(before)}, use_cache=True).logits
            wide = out[0, :-1].to(torch.float64 if out.dtype == torch.float64 else torch.float32)
            loss = cross_entropy(wide, chunk[0, 1:], reduction="sum")
            found = torch.autograd.grad(loss, [probe for _, probe in seen.values()], retain_graph=graph)
            for i, gradient in zip([*seen], found, strict=True):
                step(i, gradient)
    for handle in handles:
        handle.remove()
    return torch.cat(logits, 1)


@torch.no_grad()
def read_in(model: PreTrainedModel, ids: Tensor, parts: list[int]) -> Tensor:
    cache, found = DynamicCache(config=model.config.get_text_config()), []
    for part in ids.split(parts, dim=1):
        found.append(model(input_ids=part, **{CACHE: cache}).logits)
    return torch.cat(found, 1)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_takes_plain_gradient_steps(name: str) -> None:
    base, model = reading(name)
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    # Gemma 2's softmax is float32, and rounds rows of other lengths otherwise
    tolerance = 1e-6 if name == "gemma2" else TOLERANCE[torch.float64]
    for parts in SPLITS.values():
        assert distance(read_in(model, ids, parts), wanted) < tolerance
    with torch.no_grad():
        assert distance(model(input_ids=ids, use_cache=False).logits, wanted) < tolerance
        assert distance(base(input_ids=ids).logits, wanted) > 0.01, "the writes do not show"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_dtype(rule: str, dtype: torch.dtype) -> None:
    base, model = reading("llama", dtype, **RULES[rule])
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    for parts in (SPLITS["whole"], SPLITS["odd"]):
        assert distance(read_in(model, ids, parts).float(), wanted.float()) < TOLERANCE[dtype]
    assert distance(base(input_ids=ids).logits.detach().float(), wanted.float()) > 0.3, (
        "the writes do not show"
    )


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_chunk_can_take_several_steps(name: str, rule: dict[str, Any]) -> None:
    """Each with the state that the step before left."""
    base, model = reading(name, **rule, steps_per_chunk=3)
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    for parts in SPLITS.values():
        assert distance(read_in(model, ids, parts), wanted) < TOLERANCE[torch.float64]
    once = plain_steps(*reading(name, **rule), ids)
    assert distance(once, wanted) > 0.01, "the further steps do not show"


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """The rows [1, n] as one batch with mask and positions."""
    room = [max(row.shape[1] for row in rows) - row.shape[1] for row in rows]
    pads = [(n, 0) if side == "left" else (0, n) for n in room]
    ids, mask = (
        torch.cat([torch.nn.functional.pad(row, pad) for row, pad in zip(them, pads, strict=True)])
        for them in (rows, [torch.ones_like(row) for row in rows])
    )
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_rows_of_a_padded_batch_are_as_alone(name: str, steps: int) -> None:
    """Each row has its own state, and its chunks begin at its own first token."""
    base, model = reading(name, **SUM, steps_per_chunk=steps)
    rows = [random_ids(1, n, seed=n) for n in (33, 29, 5)]
    with torch.no_grad():
        found = model(**padded(rows, "left")).logits
    for row, logits in zip(rows, found, strict=True):
        assert (
            distance(logits[33 - row.shape[1] :], plain_steps(base, model, row)[0]) < TOLERANCE[torch.float64]
        )


def packed(lengths: list[int]) -> tuple[list[Tensor], dict[str, Any]]:
    """Documents [1, n], and the row that packs them."""
    documents = [random_ids(1, n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return documents, {"input_ids": torch.cat(documents, 1), "position_ids": positions, "use_cache": False}


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_packed_documents_are_as_alone(name: str, rule: dict[str, Any]) -> None:
    base, model = reading(name, **rule)
    documents, row = packed([9, 30, 3, 14, 22])
    with torch.no_grad():
        found = model(**row).logits
    wanted = torch.cat([plain_steps(base, model, document) for document in documents], 1)
    assert distance(found, wanted) < TOLERANCE[torch.float64]


def gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    """Of a loss of these logits, for every parameter of the base."""
    model.zero_grad()
    logits.square().mean().backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None and ".ttt." not in name
    }


def ways_of_reading(model: PreTrainedModel, documents: list[Tensor]) -> dict[str, list[Tensor]]:
    """Logits [n, V] of each document [1, n], by the way in which all of them are read."""
    lengths = [document.shape[1] for document in documents]
    longest = max(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        left = model(**padded(documents, "left")).logits
        row = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits[0]
        equal = torch.cat([document[:, : min(lengths)] for document in documents])
        return {
            "alone": [model(input_ids=document).logits[0] for document in documents],
            "batch": [*model(input_ids=equal).logits],
            "left-padded": [left[row, longest - n :] for row, n in enumerate(lengths)],
            "packed": [*row.split(lengths)],
            "pieces": [
                read_in(model, document, [n - 9, 9])[0]
                for document, n in zip(documents, lengths, strict=True)
            ],
            "token by token": [
                read_in(model, document, [1] * n)[0] for document, n in zip(documents, lengths, strict=True)
            ],
        }


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "olmo2", "phi3"])
def test_every_way_of_reading(name: str, rule: dict[str, Any], dtype: torch.dtype) -> None:
    """Six families, two rules, three dtypes, six ways; errors are those of the logits over all documents."""
    base, model = reading(name, dtype, **rule)
    documents = [random_ids(1, n, seed=n) for n in (33, 24, 17)]
    wanted = [plain_steps(base, model, document)[0] for document in documents]
    # the norms of gemma3 are float32; half precision rounds rows of other lengths otherwise, and steps amplify it
    tolerance = {
        torch.float64: 1e-6 if name == "gemma3" else 1e-12,
        torch.float32: 1e-4,
        torch.bfloat16: 0.15,
    }
    for way, found in ways_of_reading(model, documents).items():
        pairs = [(logits, right[: len(logits)]) for logits, right in zip(found, wanted, strict=True)]
        off = distance(
            *(
                torch.cat(parts).float() if dtype == torch.bfloat16 else torch.cat(parts)
                for parts in zip(*pairs, strict=True)
            )
        )
        assert off < tolerance[dtype], (way, off)


@pytest.mark.sample(8)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "olmo2", "phi3"])
def test_training_is_first_order(name: str, rule: dict[str, Any], checkpointing: bool) -> None:
    """A forward in training mode gives what reading gives, and gradients of all of it but the targets, which
    are constants."""
    base, model = reading(name, **rule)
    ids = random_ids(1, LENGTH)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = not isinstance(module, torch.nn.Dropout)
    found = model(input_ids=ids).logits
    with_writes = gradients(model, found)
    wanted = plain_steps(base, model, ids, graph=True)
    assert distance(found.detach(), wanted.detach()) < TOLERANCE[torch.float64]
    expected = gradients(base, wanted)
    assert with_writes.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # its norms are float32
        assert distance(with_writes[parameter], gradient) < (1e-5 if name == "gemma3" else 1e-9), parameter
    with disable_ttt(model):
        without = gradients(model, model(input_ids=ids).logits)
    assert any(distance(without[parameter], gradient) > 1e-3 for parameter, gradient in expected.items()), (
        "the writes do not show"
    )


@pytest.mark.parametrize("rows", ["packed", "left", "right", "short"])
def test_rows_in_training_are_as_read_alone(rows: str) -> None:
    base, model = reading("llama")
    model.train()
    if rows == "packed":
        documents, given = packed([9, 30, 3, 14, 22])
        found = [part[None] for part in model(**given).logits[0].split([9, 30, 3, 14, 22])]
    else:
        documents = [random_ids(1, n, seed=n) for n in ((6, 3) if rows == "short" else (33, 29, 5))]
        given = padded(documents, "left" if rows == "left" else "right")
        found = [
            logits[mask.bool()][None]
            for logits, mask in zip(model(**given).logits, given["attention_mask"], strict=True)
        ]
    for document, logits in zip(documents, found, strict=True):
        assert distance(logits.detach(), plain_steps(base, model.eval(), document)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sessions_fork_are_saved_and_go_on(name: str, rule: dict[str, Any], tmp_path: Path) -> None:
    _, model = reading(name, **rule)
    ids = random_ids(1, 32)
    whole = Session(model)
    whole.read(ids[:, :30])
    wanted = whole.generate(ids[:, 30:], max_new_tokens=12, do_sample=False)
    for cut in (3, 14, 25):
        session = Session(model)
        session.read(ids[:, :cut])
        session.save(tmp_path / "session")
        for other in (session.fork(), Session.load(tmp_path / "session", model)):
            other.read(ids[:, cut:30])
            assert torch.equal(other.generate(ids[:, 30:], max_new_tokens=12, do_sample=False), wanted), cut
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **given)[:, 32:], wanted)


def test_a_session_without_its_kv_cache_keeps_what_was_written() -> None:
    _, model = reading("llama")
    session = Session(model)
    session.read(random_ids(1, 18))
    left = session.drop_kv_cache()
    states = [{i: s.state for i, s in streams(one.cache).items()} for one in (session, left)]
    assert all(torch.equal(states[0][i], states[1][i]) for i in LAYERS)
    left.read(random_ids(1, 9, seed=3))  # the open chunk, whose tokens cannot be read again, begins anew
    assert next(iter(streams(left.cache).values())).written == [3]


def test_beams_keep_the_state_of_the_beam_that_they_follow() -> None:
    _, model = reading("llama")
    ids, given = random_ids(2, 12), {"max_new_tokens": 10, "do_sample": False, "num_beams": 3}
    both = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    for row, found in zip(ids, both, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **given)[0]
        assert torch.equal(alone, found[: len(alone)])


def test_inference_mode_reads_and_writes_as_ever() -> None:
    _, model = reading("llama")
    ids = random_ids(2, 12)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}

    def answers() -> list[Tensor]:
        session = Session(model)
        session.read(ids[:1].clone())
        branch = session.fork()
        branch.read(random_ids(1, 20))
        generated = [model.generate(ids.clone(), num_beams=beams, **given) for beams in (1, 3)]
        return [*generated, branch.generate(ids[:1], max_new_tokens=9, do_sample=False)]

    wanted = answers()
    with torch.inference_mode():
        found = answers()
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("read", [21, 23], ids=["whole chunks", "an open chunk"])
def test_tokens_can_be_taken_back(read: int) -> None:
    """Into the last chunk that was written, too; then the tokens after it come with positions, as `generate`
    gives them."""
    _, model = reading("llama")
    ids, other = random_ids(1, 30), random_ids(1, 8, seed=9)
    with torch.no_grad():
        wanted = Session(model)
        wanted.read(torch.cat([ids[:, :20], other], 1))
        found = DynamicCache(config=model.config)
        model(input_ids=ids[:, :read], **{CACHE: found})
        found.crop(20 - read)
        model(input_ids=other, position_ids=torch.arange(20, 28)[None], **{CACHE: found})
    for index, stream in streams(found).items():
        assert distance(stream.state, streams(wanted.cache)[index].state) < TOLERANCE[torch.float64]


def test_copies_read_alike_and_a_reverted_model_is_the_base() -> None:
    base, model = reading("llama")
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(input_ids=ids).logits, wanted)
        assert getattr(model(input_ids=ids, use_cache=False), CACHE) is None
        with disable_ttt(model):
            assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
        assert torch.equal(revert(model)(input_ids=ids).logits, base(input_ids=ids).logits)
    assert type(locate(model).base) is type(locate(base).base)


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_checkpoints_read_alike(form: str, tmp_path: Path) -> None:
    base, model = reading("llama", torch.float32)
    base.save_pretrained(tmp_path / "base")
    if form == "full":
        model.save_pretrained(tmp_path / "model")
    else:
        save_adapter(model, tmp_path / "model", base=str(tmp_path / "base"))
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model")(input_ids=ids).logits, model(input_ids=ids).logits)


def test_no_output_depends_on_a_later_token() -> None:
    _, model = reading("llama")
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for place in (6, 7, 13, 20):
            changed = ids.clone()
            changed[0, place] = (changed[0, place] + 1) % model.config.vocab_size
            assert torch.equal(model(input_ids=changed).logits[:, :place], wanted[:, :place])


def test_a_decoded_token_looks_through_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = reading("llama")
    cache = DynamicCache(config=model.config)
    looked: list[object] = []
    own = torch.nn.Module.named_modules

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        looked.append(self)
        return own(self, *args, **kwargs)

    with torch.no_grad():
        model(random_ids(1, 3), **{CACHE: cache})
        monkeypatch.setattr(torch.nn.Module, "named_modules", named_modules)
        model(random_ids(1, 1), **{CACHE: cache})
    assert not looked


def test_what_it_cannot_do_is_refused() -> None:
    _, model = reading("llama", torch.float32)
    ids = random_ids(1, LENGTH)
    with pytest.raises(
        InPlaceTTTError, match=r"trains on whole rows, without a cache; .* call model\.eval\(\)"
    ):
        model.train()(input_ids=ids, **{CACHE: DynamicCache(config=model.config)})
    with pytest.raises(InPlaceTTTError, match=r"steps_per_chunk above 1 .* cannot be trained; set it to 1"):
        reading("llama", torch.float32, **SUM, steps_per_chunk=2)[1].train()(input_ids=ids)
    with pytest.raises(InPlaceTTTError, match="does nothing without target='gradient'"):
        InPlaceTTTConfig(steps_per_chunk=2)
    model.eval()
    with pytest.raises(InPlaceTTTError, match="pass input_ids alone"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(InPlaceTTTError, match=r"this cache has a StaticLayer; use a DynamicCache"):
        model(input_ids=ids, **{CACHE: StaticCache(config=model.config, max_cache_len=64)})
    with pytest.raises(InPlaceTTTError, match="leave output_attentions out"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(InPlaceTTTError, match="packed in a row with a cache"):
        model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH // 2).repeat(2)[None],
            **{CACHE: DynamicCache(config=model.config)},
        )
    holes = torch.ones_like(ids)
    holes[0, 10] = 0
    with pytest.raises(InPlaceTTTError):
        model(input_ids=ids, attention_mask=holes)
    fresh = convert(build("llama"), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK, target="gradient"))
    with pytest.raises(InPlaceTTTError, match=r"not measured yet; run inplace_ttt\.calibrate"):
        fresh(input_ids=ids)
    assert SumRule() == InPlaceTTTConfig(target="gradient").rule


def test_a_model_that_reads_images_and_a_split_input_are_refused() -> None:
    gradient = InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK, target="gradient")
    model = build("llama")
    model.config.vision_config = {}
    with pytest.raises(InPlaceTTTError, match="reads text alone, but this model reads images too"):
        convert(model, gradient)
    assert gradient.wanting_whole_input == ["target='gradient'"]
