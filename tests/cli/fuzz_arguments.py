"""Command lines with one word replaced, added or left out."""

from __future__ import annotations

from hypothesis import strategies as st

NASTY = (
    *("", " ", "-", "--", "%s", "*", "{}", "~", "@file", "a\nb", "\0", "\udcff", "\ud800", "💥", "a" * 300, "a/" * 3000),
    *("-1", "0", "1", "1.5", "1e20", "-1e20", "9" * 20, "9" * 400, "9" * 5000, "nan", "inf", "-inf", "1e-320", "1e400", "0x10", "१२"),
    *("1_0", "1,2,3", ",", "1,,2", "0,0", "9" * 20 + ",1", "every:0", "every:" + "9" * 5000, "__class__", "None", "--json=1"),
    *("/dev/null", "/dev/zero", "/dev/full", "/", ".", "..", "../../..", "/proc/self/mem", "nobody/nothing", "https://example.org/x"),
    *("cuda", "cuda:7", "cuda:-1", "meta", "cpu:3", "float8_e4m3fn", "int8", "complex64", "bool"),
    *("[", "{", "=", "a=b", "a.b=[", "&a [*a]", "eta=.nan", "layers=[[[]]]", "x.y.z=1", "whitening.rank=1e400", "chunk_size=" + "9" * 5000),
    *("kernel_size=99999999", "eta=1e30", "ridge=1e-320", "update_rule=[]", "model.config.vocab_size=1e12", "data.sequence_length=1e15"),
    "training.seed=-1",
)  # fmt: skip

_READ = "--prompt-file text.txt"
_TEXTS = "--text text.txt other.txt"

COMMANDS = (
    "convert base out --layers 0 --chunk-size 8 --eta 1 --target embeddings --preset paper --set kernel_size=3 --no-verify",
    "convert base out --preset ridge --set proj_init=random_diagonal --calibrate text.txt --calibrate-tokens 64 --no-verify --adapter-only",
    "info lora --base base",
    f"generate ttt {_READ} --max-new-tokens 2 --temperature 1 --seed 1 --ttt on --dtype float32",
    f"generate lora {_READ} --max-new-tokens 0 --base base --save-state out --fast-weights-only",
    "chat ttt --read text.txt --session out --system brief --max-new-tokens 2 --temperature 1 --ttt on --dtype float32",
    "chat lora --base base --max-new-tokens 2",
    "plan recipe.yaml --set training.steps=3 --device-memory 1GB",
    "train recipe.yaml --set training.steps=3 --num-processes 1",
    "diagnose ttt --text text.txt --out out --tokens 40 --train all --learning-rate 1e-3 --dtype float32",
    f"evaluate ttt {_TEXTS} --base base --documents 2 --tokens 20 --window 8 --sinks 2 --skip 9 --batch-size 2 --dtype float32",
    f"evaluate ttt {_TEXTS} --tokens 20 --repeated-passage --passage 4,4 --contexts 8 --block 4 --cache out",
    f"evaluate ttt {_TEXTS} --tokens 20 --window 8 --facts 1 --distances 8,16 --seed 1",
    "evaluate base --lengths 2000 --tasks ruler_vt --samples 1 --seed 1 --write-samples out",
    "evaluate base --lengths 512 --tasks ruler_qa_1 --samples 1 --qa questions.jsonl --text text.txt --write-samples out",
    "evaluate base --lengths 1500 --tasks babilong_qa4,babilong_qa1 --samples 1 --seed 1 --text text.txt other.txt --write-samples out",
    "evaluate ttt --lengths 900 --tasks babilong_qa4 --samples 1 --text text.txt --base base --dtype float32",
    "evaluate ttt --tasks task.yaml --samples 1 --batch-size 2",
    "export ttt out --format adapter",
    "export lora out --format full --base base",
    "export ttt out --format plain --session state --text text.txt",
    "export ttt out --format=lora --rank 4 --session state state",
    "import-reference public out",
    "bench --d 8 --h 8 --tokens 16 --chunk-size 8 --repeats 1 --device cpu --dtype float32",
    "audit ttt --profile paper --format md --out out --seed 1",
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A command of the list as words, and these with one replaced by a nasty one, or one left out, doubled or
    added."""
    words = draw(st.sampled_from(COMMANDS)).split()
    place = draw(st.integers(1, len(words) - 1))
    how = draw(st.sampled_from(["replace", "replace", "replace", "replace", "drop", "double", "add"]))
    changed = list(words)
    if how == "replace":
        changed[place] = draw(st.sampled_from(NASTY))
    elif how == "drop":
        del changed[place]
    elif how == "double":
        changed.insert(place, words[place])
    else:
        changed.insert(place, draw(st.sampled_from(NASTY)))
    return f"{how} {place}: {changed[place : place + 1]}", changed
