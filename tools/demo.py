"""Shows the main job end to end on a real model.

The model first learns a short note untrained. Then a checkpoint is converted, verified, read with, saved,
loaded in another process, and trained.

    python tools/demo.py --model .cache/smollm2-135m --text .cache/text
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from inplace_ttt import Session, disable_ttt, load
from inplace_ttt.layer.cache import streams
from inplace_ttt.surgery import fast_weights

CHUNK, ETA, READ, WRITE = 256, 1e-4, 3000, 40
QUESTION = "\n\nAnd then Hamlet said:"
NOTE = Path(__file__).parents[1] / "docs" / "notes.txt"
NOTE_QUESTION, NOTE_ANSWER = "The keeper of the lighthouse at Varnholm is called", "Ottoline Brask"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2-135m", help="base model folder")
    parser.add_argument("--text", default=".cache/text", help="folder of texts")
    parser.add_argument("--work", default=".demo", help="output folder of the demo")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start, work = time.monotonic(), Path(args.work)
    work.mkdir(exist_ok=True)
    converted, tapped = work / "smollm2-ttt", work / "smollm2-tap"

    remembers = remember_a_note(args, work)

    title("2. Convert a checkpoint by the paper's rule, and verify that it is still the same model")
    result = cli("convert", args.model, converted, "--chunk-size", CHUNK, "--eta", ETA, "--overwrite")
    print(f"   layers {result['layers']}, {result['new_parameters']:,} new parameters")
    print(f"   largest logit difference to the base: {result['identity']['max_abs_logit_diff']:g}")

    title("3. Set conv and P by hand: the target of a token becomes the next token's embedding")
    model = load(converted)
    next_token_tap(model)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model.save_pretrained(tapped)
    tokenizer.save_pretrained(tapped)
    print(f"   saved {tapped} (training learns this tap; a fresh conversion writes nothing)")

    title("4. Read a long text while the weights change, and save the session")
    play = next(Path(args.text, "shakespeare").glob("hamlet.txt")).read_text(encoding="utf-8")
    text = tokenizer.decode(tokenizer(play).input_ids[2000 : 2000 + READ])
    (work / "text.txt").write_text(text, encoding="utf-8")
    (work / "question.txt").write_text(QUESTION, encoding="utf-8")
    session = work / "hamlet.state"
    result = cli(
        "generate", tapped, "--prompt-file", work / "text.txt", "--max-new-tokens", 0, "--save-state", session
    )
    print(f"   read {result['tokens_read']} tokens, wrote {result['chunks_written']} chunks")
    print(
        f"   session on disk: {result['saved_state']['bytes'] / 2**20:.1f} MiB, fast weights "
        f"{result['state_bytes'] / 2**20:.1f} of it"
    )

    title("5. A new process loads the session and continues")
    answer = cli(
        "generate",
        tapped,
        "--prompt-file",
        work / "question.txt",
        "--max-new-tokens",
        WRITE,
        "--load-state",
        session,
    )["text"]
    print(f"   {QUESTION.strip()} {answer.strip()!r}")

    title("6. The same without a break, in this process")
    model = load(tapped)
    state, unbroken = read_unbroken(model, tokenizer, text)
    same = answer == unbroken
    print(f"   token for token the same: {'yes' if same else 'NO'}")
    for layer, stream in streams(state.cache).items():
        fast = fast_weights(model)[layer]
        change = float(fast.eta * stream.state.norm() / fast.weight.detach().float().norm())
        print(f"   layer {layer:2}: {stream.written[0]} chunks written, the weight has moved by {change:.2%}")
    losses = losses_on_and_off(model, tokenizer(text, return_tensors="pt").input_ids)
    print(
        f"   loss of the text past the first chunk: {losses['on']:.4f} with writes, {losses['off']:.4f} "
        "without"
    )
    print("   (an untrained target generator does not help; it shows the mechanism, not the gain)")

    title("7. Train conv and P for ten steps: DeepSpeed, two processes")
    recipe = Path(__file__).parents[1] / "recipes" / "smollm2-demo-cpu.yaml"
    settings = [f"model.path={args.model}", f"data.train={args.text}", f"output={work / 'trained'}"]
    trained = cli(
        "train", recipe, "--from-scratch", *(part for setting in settings for part in ("--set", setting))
    )["evaluation"]
    learns = trained["eval_loss"] < trained["eval_off_loss"]
    print(
        f"   held-out loss {trained['eval_loss']:.4f} with writes; {trained['eval_off_loss']:.4f} without, "
        "which is where it began"
    )
    print(
        f"   ten steps are no proof of memory; they show that it trains. What the run saw: {work / 'trained'}"
    )
    print(f"\nDone in {time.monotonic() - start:.0f} s.")
    if not same:
        print("The broken and the unbroken session differ.")
    if not learns:
        print("Training did not lower the loss with writes.")
    if not remembers:
        print("The note was not remembered.")
    return 0 if same and learns and remembers else 1


def remember_a_note(args: argparse.Namespace, work: Path) -> bool:
    """Returns True if the model answers a question about a note from its fast weights alone, and cannot
    answer without them."""
    title(
        "1. Read a note four times, untrained; then ask in a new process, without the text and without its "
        "KV cache"
    )
    converted, session, question = work / "smollm2-notes", work / "notes.state", work / "note-question.txt"
    calibration = ("--calibrate", args.text, "--calibrate-tokens", 1024)
    cli("convert", args.model, converted, "--preset", "notes", *calibration, "--overwrite")
    question.write_text(NOTE_QUESTION, encoding="utf-8")
    how, ask = ("--dtype", "float32"), ("--prompt-file", question, "--max-new-tokens", 5)
    note = ("--prompt-file", NOTE, "--readings", 4, "--max-new-tokens", 0)
    read = cli("generate", converted, *how, *note, "--fast-weights-only", "--save-state", session)
    print(
        f"   wrote {read['chunks_written']} chunks; the session holds "
        f"{read['saved_state']['bytes'] / 2**20:.1f} MiB of fast weights"
    )
    without = cli("generate", converted, *how, *ask)["text"]
    told = cli("generate", converted, *how, *ask, "--load-state", session)["text"]
    print(f"   {NOTE_QUESTION!r}\n   without the note: {without!r}\n   with it:          {told!r}")
    return NOTE_ANSWER in told and NOTE_ANSWER not in without


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def cli(*arguments: object) -> dict[str, Any]:
    """Runs one verb in a process of its own, as a user would, and returns its JSON."""
    command = [str(argument) for argument in arguments]
    print(f"   $ inplace-ttt {' '.join(repr(a) if ' ' in a else a for a in command)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "inplace_ttt.cli", *command, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


@torch.no_grad()
def next_token_tap(model: PreTrainedModel) -> None:
    """Sets V_t = X_{t+1}: the convolution has a tap of 1 on the next token and 0 elsewhere, and P is the
    identity."""
    for layer in fast_weights(model).values():
        taps = layer.ttt.conv.shape[-1]
        layer.ttt.conv.zero_()
        layer.ttt.conv[:, 0, taps // 2 + 1] = 1.0
        layer.ttt.proj.copy_(torch.eye(layer.ttt.proj.shape[0]))


def read_unbroken(model: PreTrainedModel, tokenizer: Any, text: str) -> tuple[Session, str]:
    """Reads the text and the question and generates the answer, all in one session."""
    ids, question = (
        tokenizer(part, return_tensors="pt", add_special_tokens=part is text).input_ids
        for part in (text, QUESTION)
    )
    state = Session(model)
    state.read(ids)
    answer = state.generate(question, max_new_tokens=WRITE, do_sample=False)
    return state, tokenizer.decode(answer[0], skip_special_tokens=True)


@torch.no_grad()
def losses_on_and_off(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Returns the mean next-token loss past the first chunk, in nats, with writes and without."""

    def loss() -> float:
        logits = model(ids, use_cache=False).logits[0, CHUNK:-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[0, CHUNK + 1 :]))

    on = loss()
    with disable_ttt(model):
        return {"on": on, "off": loss()}


if __name__ == "__main__":
    sys.exit(main())
