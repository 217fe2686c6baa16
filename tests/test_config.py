"""The config: presets, JSON, and every refusal with what is wrong, where, and what to do."""

import json
from typing import Any

import pytest

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, UpdateClip
from inplace_ttt.config import PRESETS

CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "named layers": {"layers": [0, 6, 12], "eta": [1, 0.5, 0]},
    "everything": {
        "layers": "every:3", "chunk_size": 512, "eta": 0.25, "target": "hidden_states", "conv": "causal", "kernel_size": 4,
        "clip": UpdateClip(0.1, True, "always"), "detach_target": True, "update_on_decode": False,
    },
    "next-token prediction": {
        "conv": "next", "target": "hidden_states", "proj_init": "shared_diagonal", "write_norm": "spectral", "preserve_row_norms": True,
        "prompt_write": {"window": 9, "cap": None},
    },
    "clip from JSON": {"clip": {"max_norm": 1e-3, "mode": "always"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_json_round_trip(name: str) -> None:
    config = InPlaceTTTConfig(**CONFIGS[name])
    text = json.dumps(config.to_dict())
    assert InPlaceTTTConfig.from_dict(json.loads(text)) == config
    assert json.dumps(InPlaceTTTConfig.from_dict(json.loads(text)).to_dict()) == text
    assert hash(config) == hash(InPlaceTTTConfig.from_dict(json.loads(text)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_and_take_overrides(name: str) -> None:
    assert (
        InPlaceTTTConfig.preset(name) == PRESETS[name] == InPlaceTTTConfig.from_dict(PRESETS[name].to_dict())
    )
    changed = InPlaceTTTConfig.preset(name, chunk_size=3, clip={"max_norm": 2}, write_norm=None)
    assert (changed.chunk_size, changed.clip) == (3, UpdateClip(2))
    assert changed.target == PRESETS[name].target and changed.eta == PRESETS[name].eta


def test_the_presets_say_what_their_sources_say() -> None:
    paper, reference = PRESETS["paper"], PRESETS["reference"]
    assert (paper.target, paper.layers, paper.kernel_size, paper.conv, paper.clip) == (
        "embeddings",
        "every:6",
        5,
        "lookahead",
        None,
    )
    assert (reference.target, reference.chunk_size, reference.eta) == ("hidden_states", 4096, 3.0)
    assert InPlaceTTTConfig() == paper


@pytest.mark.parametrize(
    ("layers", "of", "expected"),
    [
        ("every:6", 13, (0, 6, 12)),
        ("every:6", 12, (0, 6)),
        ("every:1", 3, (0, 1, 2)),
        ("every:50", 4, (0,)),
        ((1, 3), 4, (1, 3)),
        ("upper:6", 30, (12, 18, 24)),
        ("upper:1", 5, (2, 3, 4)),
        ("upper:9", 4, (0,)),
    ],
)
def test_resolve_writes_the_layers_out(layers: Any, of: int, expected: tuple[int, ...]) -> None:
    config = InPlaceTTTConfig(layers=layers, chunk_size=9)
    assert config.resolve(of).layers == expected and config.resolve(of).chunk_size == 9
    assert config.resolve(of).resolve(of) == config.resolve(of)


def test_eta_by_layer() -> None:
    assert [InPlaceTTTConfig(layers=(0, 2), eta=(0.5, 2.0)).eta_of(i) for i in (0, 1)] == [0.5, 2.0]
    assert [InPlaceTTTConfig(layers=(0, 2), eta=0.5).eta_of(i) for i in (0, 1)] == [0.5, 0.5]


def test_resolve_refuses_what_the_model_does_not_have() -> None:
    with pytest.raises(
        InPlaceTTTError, match=r"layers \[36, 40\] do not exist: the model has 36 layers, 0 to 35\."
    ):
        InPlaceTTTConfig(layers=(0, 36, 40)).resolve(36)
    with pytest.raises(
        InPlaceTTTError, match=r"eta has 2 values for 3 layers; give one number or one per layer\."
    ):
        InPlaceTTTConfig(layers="every:1", eta=(1.0, 2.0)).resolve(3)


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, list[dict[str, Any]]]] = [
    ("layers must be 'every:N', 'upper:N' or a list", [{"layers": x} for x in ("every:0", "every:", "6", "every:2 ", "every:1.5", "")]),
    ("layers must be 'every:N', 'upper:N' or a non-empty list", [{"layers": x} for x in ([], (-1,), (0.0,), (True,), 6, None, ["0"])]),
    ("layers names a layer twice", [{"layers": (1, 1)}]),
    ("layers must be in order", [{"layers": (2, 1)}]),
    ("chunk_size must be an integer of at least 1", [{"chunk_size": x} for x in (0, -4, 2.0, "512", None, True)]),
    ("eta must be a number of at least 0", [{"eta": x} for x in (-1.0, NAN, INF, "1", None, True, (), (1.0, None))]),
    ("eta has 1 values for 2 layers; give one", [{"layers": (0, 2), "eta": (1.0,)}]),
    ("target must be one of ('embeddings', 'hidden_states', 'gradient')", [{"target": x} for x in ("embedding", "", None, 1)]),
    ("conv must be one of ('lookahead', 'causal', 'next')", [{"conv": x} for x in ("left", None)]),
    ("kernel_size must be an integer of at least 1", [{"kernel_size": x} for x in (0, -1, 5.0, None, True)]),
    ("kernel_size 4 is even, but a lookahead convolution is symmetric; use an odd size or conv='causal'", [{"kernel_size": 4}]),
    ("clip must be a UpdateClip or nothing", [{"clip": x} for x in (1.0, "inference", [])]),
    ("clip.max_norm must be a number above 0", [{"clip": {"max_norm": x}} for x in (0, -1, NAN, INF, "1", None, True)]),
    ("clip.relative must be true or false", [{"clip": {"max_norm": 1, "relative": x}} for x in (1, None, "yes")]),
    ("clip.mode must be one of ('inference', 'always')", [{"clip": {"max_norm": 1, "mode": x}} for x in ("never", "", None)]),
    ("clip takes no setting 'taus'; known settings: max_norm, relative, mode", [{"clip": {"taus": 1}}]),
    ("clip is incomplete", [{"clip": {}}]),
    ("detach_target must be true or false", [{"detach_target": x} for x in (1, None, "true")]),
    ("eta must be from 1e-30 to 1e+30", [{"eta": x} for x in (1e308, 1e-320, (1.0, 1e31))]),
    ("clip.max_norm must be from 1e-30", [{"clip": {"max_norm": x}} for x in (1e-320, 1e300)]),
    ("ridge must be from 1e-30", [{"update_rule": "ridge", "ridge": x} for x in (1e-320, 1e300)]),
    ("ridge must be a number above 0", [{"update_rule": "ridge", "ridge": x} for x in (0, -1, NAN, "1", True)]),
    ("update_rule must be one of ('sum', 'ridge')", [{"update_rule": x} for x in ("plain", None, 1)]),
    ("update_rule='ridge' needs ridge", [{"update_rule": "ridge"}, {"update_rule": "ridge", "ridge": None}]),
    ("ridge belongs to update_rule='ridge', but the rule is 'sum'", [{"ridge": 0.5}, {"update_rule": "sum", "ridge": 1}]),
    ("whitening.rank must be an integer of at least 1, a f", [{"whitening": {"rank": x}} for x in (0, -1, 0.0, 1.5, NAN, True, "8")]),
    ("chunk_size must be at most", [{"chunk_size": 10**20}]),
    ("kernel_size must be at most", [{"kernel_size": 10**9 + 1}]),
    ("layers must be 'every:N', 'upper:N'", [{"layers": "every:" + "9" * 5000}]),
    ("update_on_decode must be true or false", [{"update_on_decode": x} for x in (0, None)]),
    ("kernel_size 3 is of a convolution, and conv='next' has none", [{"conv": "next", "kernel_size": 3}]),
    ("proj_init must be one of", [{"proj_init": x} for x in ("small", None, 1)]),
    ("write_norm must be 'spectral' or nothing", [{"write_norm": x} for x in ("frobenius", 1, True)]),
    ("preserve_row_norms must be true or false", [{"preserve_row_norms": x} for x in (1, None, "yes")]),
    ("write_norm belongs to update_rule='sum', but", [{"write_norm": "spectral", "update_rule": "ridge", "ridge": 0.5}]),
    ("preserve_row_norms belongs to update_rule='sum', but", [{"preserve_row_norms": True, "update_rule": "ridge", "ridge": 0.5}]),
    ("conv does nothing with target='gradient'", [{"target": "gradient", "conv": "next"}, {"target": "gradient", "conv": "causal"}]),
    ("update_on_decode does nothing with target='gradient'", [{"target": "gradient", "update_on_decode": False}]),
    ("a chunk of one token lacks a loss of its own", [{"target": "gradient", "chunk_size": 1}]),
    ("write_gate belongs to update_rule='ridge', but the rule is 'sum'", [{"write_gate": True}, {"write_gate": True, "whitening": {}}]),
    ("prompt_write belongs to update_rule='sum', but", [{"conv": "next", "prompt_write": {}, "update_rule": "ridge", "ridge": 1}]),
    ("write_gate weighs tokens by their whitened keys", [{"write_gate": True, "update_rule": "ridge", "ridge": 0.5}]),
    ("write_gate must be true or false", [{"write_gate": 1, "update_rule": "ridge", "ridge": 0.5}]),
    ("leaves a clip nothing to bound", [{"write_norm": "spectral", "clip": {"max_norm": 1}}]),
    ("prompt_write.window must be an integer from 1", [{"conv": "next", "prompt_write": {"window": x}} for x in (0, 1.5, True, None)]),
    ("prompt_write.ridge must be a number above 0,", [{"conv": "next", "prompt_write": {"ridge": x}} for x in (0, -1, NAN, None)]),
    ("prompt_write.cap must be a number above 0, or left out", [{"conv": "next", "prompt_write": {"cap": x}} for x in (0, "1")]),
    ("prompt_write.preserve_row_norms must be true or false", [{"conv": "next", "prompt_write": {"preserve_row_norms": 1}}]),
    ("prompt_write must be a PromptWrite or nothing", [{"conv": "next", "prompt_write": x} for x in (True, 8192, [])]),
    ("prompt_write fits the next token's source", [{"prompt_write": {}}, {"conv": "next", "prompt_write": {}, "whitening": {}}]),
    ("preserve_row_norms needs writes in the coordinates of W0", [{"preserve_row_norms": True, "whitening": {}}]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "cases"), REFUSED)
def test_refusals_name_the_setting_and_the_value(message: str, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        for build in (
            lambda case: InPlaceTTTConfig(**case),
            InPlaceTTTConfig.from_dict,
            lambda case: InPlaceTTTConfig.preset("paper", **case),
        ):
            with pytest.raises(InPlaceTTTError) as error:
                build(case)
            assert message in str(error.value) and "\n" not in str(error.value), case
        with pytest.raises(InPlaceTTTError):
            InPlaceTTTConfig.from_dict(case)


def test_unknown_settings_and_presets_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InPlaceTTTError,
        match=r"the TTT config takes no setting 'chunk', 'lr'; known settings: layers, chunk_size, eta",
    ):
        InPlaceTTTConfig.from_dict({"lr": 1, "chunk": 2, "eta": 1})
    with pytest.raises(
        InPlaceTTTError, match=r"preset 'papers' does not exist; choose one of paper, reference"
    ):
        InPlaceTTTConfig.preset("papers")
