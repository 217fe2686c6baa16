"""The page of `inplace-ttt chat MODEL --web`, made with Gradio, for this machine alone.

Turns run in threads of their own (named.py). Each tab asks for their state by a timer, so that every tab
shows the same after a reload, and while another tab asks.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import InPlaceTTTError, how_to_install, reported
from .. import Result
from ..messages import say_now
from ..options.chat import PORT, SESSIONS
from . import transcript
from .conversation import Conversation, text_of
from .look import CSS
from .named import Named, Sessions, Turn
from .terminal import note

HOST = "127.0.0.1"
_BUSY, _IDLE = 0.25, 2.0
"""Seconds between two looks of a tab at its session: during a turn, and else."""
_REMEMBER = """(name) => {
  const url = new URL(window.location);
  url.searchParams.set("session", name);
  window.history.replaceState(null, "", url);
}"""
"""Puts the session's name into the page's address, where a reload finds it."""
_REMEMBERED = "() => new URLSearchParams(window.location.search).get('session')"
_SURE = "(name) => [name, window.confirm(`Forget all that ${name} has read?`)]"


def prepare(args: argparse.Namespace) -> None:
    """Checks everything that the page needs, before the model is loaded.

    Raises:
        InPlaceTTTError: if Gradio is not installed, the port is taken, or the folder cannot be made.
    """
    if find_spec("gradio") is None:
        raise InPlaceTTTError(f"--web needs Gradio, which is not installed; {how_to_install('web')}.")
    args.port, args.sessions = args.port or PORT, args.sessions or SESSIONS
    Path(args.sessions).mkdir(parents=True, exist_ok=True)
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, args.port))
        except OSError as error:
            raise InPlaceTTTError(
                f"port {args.port} of {HOST} cannot be used ({error.strerror}); give another --port."
            ) from None


def serve(args: argparse.Namespace, opened: Callable[[str | None], Conversation]) -> Result:
    """Serves the page until Ctrl-C.

    Args:
        args: of the command, after `prepare`.
        opened: returns the conversation in a session file.

    Returns:
        The page's address and the folder of the sessions.
    """
    sessions = Sessions(Path(args.sessions), opened)
    with TemporaryDirectory(prefix="inplace-ttt-") as uploads:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        made = page(sessions, args.path)
        address = f"http://{HOST}:{args.port}"
        with reported(f"cannot serve {address}", "give another --port"):
            _launch(made, args.port)
        say_now()
        note(f"{address} has the chat, with the sessions in {args.sessions}; Ctrl-C ends it")
        try:
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
        finally:
            sessions.close()
            made.close(verbose=False)
    return {"address": address, "sessions": str(args.sessions)}, 0


def _launch(made: Any, port: int) -> None:
    import gradio as gr

    made.queue(default_concurrency_limit=None, api_open=False).launch(
        server_name=HOST,
        server_port=port,
        share=False,
        inbrowser=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        ssr_mode=False,
        css=CSS,
        theme=gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "Consolas", "monospace"]
        ),
    )


def page(sessions: Sessions, model: str) -> Any:
    """Returns the page, a `gradio.Blocks`."""
    import gradio as gr

    with gr.Blocks(title=f"{Path(model).name} · inplace-ttt chat", analytics_enabled=False) as made:
        gr.HTML(
            f"<h1>{escape(Path(model).name)}</h1><p>Reads texts and turns into its fast weights, and "
            "remembers each session by name.</p>",
            elem_id="head",
        )
        seen, timer = gr.State(()), gr.Timer(_IDLE)
        with gr.Row():
            with gr.Column(scale=1, min_width=260, elem_id="side"):
                name = gr.Radio([], label="Sessions", elem_id="names")
                other = gr.Textbox(
                    max_lines=1, show_label=False, placeholder="name for New or Fork", elem_id="other"
                )
                with gr.Row():
                    new, fork = (gr.Button(label, size="md", min_width=60) for label in ("New", "Fork"))
                with gr.Row():
                    save, forget = (gr.Button(label, size="md", min_width=60) for label in ("Save", "Forget"))
                drop = gr.Button("Drop KV cache", size="md")
                sizes = gr.HTML()
            with gr.Column(scale=4, elem_id="main"):
                shown = gr.HTML(elem_id="transcript")
                state = gr.HTML(elem_id="state")
                with gr.Row(equal_height=True):
                    question = gr.Textbox(
                        label="Question (Shift+Enter asks it)",
                        lines=3,
                        max_lines=8,
                        scale=3,
                        autofocus=True,
                        elem_id="question",
                    )
                    files = gr.File(
                        label="UTF-8 texts to read",
                        file_count="multiple",
                        height=140,
                        scale=2,
                        elem_id="files",
                    )
                with gr.Row():
                    both = gr.Checkbox(
                        True,
                        label="Answer without the fast weights too",
                        info="After Drop KV cache, the fast weights alone hold the earlier texts.",
                        scale=3,
                        min_width=260,
                    )
                    stop = gr.Button("Stop", variant="stop", interactive=False, min_width=100)
                    ask = gr.Button("Ask", variant="primary", min_width=100)
        sure, address = gr.Checkbox(visible=False), gr.Textbox(visible=False)
        views = [name, shown, state, sizes, ask, stop, timer, seen]

        def view(chosen: str | None, last: Any = None, *, choose: bool = False) -> list[Any]:
            """Returns new values of `views`; changes nothing if the tab has seen this state already.

            An answer to an earlier event must not undo the user's choice of another session meanwhile, so
            that only `choose` sets it.
            """
            names, named = sessions.names(), None
            if chosen is not None:
                with _told():
                    named = sessions.get(chosen)
            if named is None:
                radio = gr.Radio(choices=names) if chosen is None else gr.Radio(choices=names, value=None)
                return [radio, *[gr.skip()] * 6, ()]
            turn = named.turn if named.is_busy else None
            now = (chosen, names, named.version, turn and (turn.label, turn.read))
            if now == last:
                return [gr.skip()] * len(views)
            return [
                gr.Radio(choices=names, value=chosen) if choose else gr.Radio(choices=names),
                transcript.html(named.entries, unseen_tokens=named.tokens),
                _state(turn, named.problem),
                _sizes(named),
                gr.Button(interactive=turn is None),
                gr.Button(interactive=turn is not None),
                gr.Timer(_IDLE if turn is None else _BUSY),
                now,
            ]

        def loaded(wanted: str | None) -> list[Any]:
            return view(wanted if wanted in sessions.names() else sessions.first(), choose=True)

        def act(action: Callable[..., None]) -> Callable[..., list[Any]]:
            """Returns an event that does something with the session, and shows the result."""

            def event(chosen: str, *given: Any) -> list[Any]:
                with _told():
                    action(chosen, *given)
                return view(chosen)

            return event

        def made_new(chosen: str, wanted: str) -> list[Any]:
            text = gr.skip()  # a refused text stays, as it may have changed since
            with _told():
                chosen, text = sessions.new(wanted), ""
            return [text, *view(chosen, choose=text == "")]

        def forked(chosen: str, wanted: str) -> list[Any]:
            text = gr.skip()
            with _told():
                sessions.fork(chosen, wanted)
                gr.Info(f"{wanted} is a copy of {chosen}.")
                text = ""
            return [text, *view(chosen)]

        def asked(chosen: str, question: str, both: bool) -> list[Any]:
            text = gr.skip()
            with _told():
                if question.strip():
                    sessions.ask(chosen, question.strip(), both)
                text = ""
            return [text, *view(chosen)]

        def dropped(chosen: str, paths: list[str]) -> list[Any]:
            with _told():
                sessions.read(chosen, [_uploaded(Path(path)) for path in paths])
            return [None, *view(chosen)]

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        made.load(loaded, address, views, js=_REMEMBERED, **quiet)
        timer.tick(view, [name, seen], views, **quiet)
        name.input(view, name, views, **quiet)
        name.change(None, name, None, js=_REMEMBER, **quiet)
        new.click(made_new, [name, other], [other, *views], **quiet)
        fork.click(forked, [name, other], [other, *views], **quiet)
        drop.click(act(sessions.drop), name, views, **quiet)
        save.click(act(sessions.save), name, views, **quiet)
        forget.click(
            act(lambda chosen, agreed: sessions.forget(chosen) if agreed else None),
            [name, sure],
            views,
            js=_SURE,
            **quiet,
        )
        for begun in (ask.click, question.submit):
            begun(asked, [name, question, both], [question, *views], **quiet)
        files.upload(dropped, [name, files], [files, *views], **quiet)
        stop.click(act(sessions.stop), name, views, **quiet)
    return made


@contextmanager
def _told() -> Iterator[None]:
    """Shows an error raised inside the `with` block as a warning on the page."""
    import gradio as gr

    try:
        yield
    except InPlaceTTTError as error:
        gr.Warning(escape(str(error)))


def _state(turn: Turn | None, problem: str) -> str:
    """Returns the line below the transcript, as HTML."""
    if turn is None:
        return f'<div class="state"><span class="problem" role="alert">{escape(problem)}</span></div>'
    if not turn.total:
        return f'<div class="state"><span class="busy">{escape(turn.label)} …</span></div>'
    return (
        f'<div class="state"><span class="busy">{escape(turn.label)}: {turn.read:,} of {turn.total:,} tokens'
        f'</span><progress value="{turn.read}" max="{turn.total}"></progress></div>'
    )


def _sizes(named: Named) -> str:
    """Returns the sizes of a session, as HTML."""
    return f'<div class="sizes">{"".join(f"<p>{escape(size)}</p>" for size in named.info.split("; "))}</div>'


def _uploaded(file: Path) -> tuple[str, str]:
    """Returns the name and text of a file that was dropped onto the page, and removes the upload.

    Raises:
        InPlaceTTTError: if it is not a UTF-8 text, or is empty.
    """
    try:
        return file.name, text_of(str(file))
    except InPlaceTTTError as error:
        raise InPlaceTTTError(str(error).replace(str(file), file.name)) from None
    finally:
        file.unlink(missing_ok=True)
