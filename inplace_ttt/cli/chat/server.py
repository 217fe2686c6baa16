"""A conversation with a running server. Files go into one of its memories; each request sends all turns."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, BinaryIO

from ...errors import InPlaceTTTError, one_line
from ...files.folders import new_file
from ...serving.memory import check_name
from ...session.file import refuse_to_replace
from .terminal import Stop

_SECONDS = 600
"""Seconds that the server may need before each piece of a response."""
_READ_AT_ONCE = 4096
"""Most tokens of a file per request: the steps of the progress bar, and of Ctrl-C."""


class ServerConversation:
    """A conversation with a running `inplace-ttt serve`.

    `read` writes files into the memory. Answers read the memory and leave it unchanged, so that no turn is
    written twice; the conversation's turns are sent with each question.

    Args:
        address: of the server, with or without `/v1`.
        key: API key, or None.
        memory: name of the memory, or None to chat without one.
        system: instructions at the start, or None.
        max_new_tokens: most tokens of an answer.
        temperature: of sampling; 0 takes the most likely token.

    Attributes:
        file: None, because the server keeps the memory.
        is_saved: False if the server would lose the memory when it ends.

    Raises:
        InPlaceTTTError: if the name is invalid, or the server cannot be reached or refuses the key.
    """

    file = None

    def __init__(
        self,
        address: str,
        key: str | None,
        memory: str | None,
        system: str | None,
        max_new_tokens: int,
        temperature: float,
    ) -> None:
        if memory is not None:
            check_name(memory)
        self.address, self.memory = address.rstrip("/").removesuffix("/v1"), memory
        self.is_saved = True
        self._key = key
        models = self._asked("GET", "/v1/models")
        try:
            self._model = models["data"][0]["id"]
            self._most = int(models["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise InPlaceTTTError(
                f"{self.address} is not a server of this package; start one with `inplace-ttt serve`."
            ) from None
        self._start = [{"role": "system", "content": system.strip()}] if system else []
        self._turns = [*self._start]
        self._turns_off: list[dict[str, str]] | None = None
        self._how = {"max_completion_tokens": max_new_tokens, "temperature": temperature}
        self._about()

    @property
    def is_on(self) -> bool:
        """True while answers use the fast weights."""
        return self._turns_off is None

    @property
    def chunks_written(self) -> int:
        """Chunks in the memory."""
        return int(self._about().get("chunks", 0))

    def read(self, text: str, source: str, stop: Stop, advance: Callable[[int, int], None]) -> int:
        """Reads a file's text into the memory.

        Args:
            text: of the file.
            source: the file, for messages.
            stop: ends the reading between two requests.
            advance: called after each request, with the tokens read so far and all tokens.

        Returns:
            The number of tokens read.

        Raises:
            InPlaceTTTError: without a memory, while TTT is off, or if the server refuses.
        """
        if self.memory is None:
            raise InPlaceTTTError(
                f"{source} needs a memory to be read into; start the chat with --memory NAME."
            )
        if not self.is_on:
            raise InPlaceTTTError(f"TTT is off, so {source} cannot be read into the memory; give /on first.")
        begins, ids = self._tokens(""), self._tokens(text)
        ids = ids[len(begins) :] if ids[: len(begins)] == begins else ids
        size = max(min(_READ_AT_ONCE, self._most - 1) - len(begins), 1)
        read = 0
        for start in range(0, len(ids), size):
            if stop.asked:
                break
            piece = ids[start : start + size]
            # the server reads each request as a text of its own: from position 0, with the model's BOS
            prompt = {"prompt": begins + piece, "max_tokens": 1, "memory": self.memory}
            self._asked("POST", "/v1/completions", {"model": self._model, **prompt})
            read += len(piece)
            advance(read, len(ids))
        return read

    def answer(self, question: str, stop: Stop, write: Callable[[str], None]) -> str:
        """Sends the conversation with a question, and returns the answer.

        Args:
            question: the user's text.
            stop: ends the answer.
            write: called with each piece of the answer.

        Raises:
            InPlaceTTTError: if the server refuses or fails. The conversation is then as before.
        """
        turns = self._turns if self._turns_off is None else self._turns_off
        asked = [*turns, {"role": "user", "content": question}]
        if not self.is_on:
            ours: dict[str, Any] = {"ttt": "off"}
        else:
            ours = {"memory": self.memory, "freeze": True} if self._about() else {}
        body = {"model": self._model, "messages": asked, "stream": True, **self._how, **ours}
        answer = ""
        with self._response("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                text = event["choices"][0]["delta"].get("content") or "" if event.get("choices") else ""
                text = text if answer else text.lstrip()
                if text:
                    answer += text
                    write(text)
                if stop.asked:
                    break
        turns[:] = [*asked, {"role": "assistant", "content": answer.strip()}]
        return answer.strip()

    def switch(self, on: bool) -> None:
        """Answers with the fast weights, or without them in a copy of the conversation."""
        if on:
            self._turns_off = None
        elif self._turns_off is None:
            self._turns_off = [*self._turns]

    def forget(self) -> None:
        """Deletes the memory, and begins a new conversation."""
        if self._about():
            self._asked("DELETE", f"/v1/memories/{self.memory}")
        self.drop()

    def drop(self) -> None:
        """Begins a new conversation with the same memory."""
        self._turns[:] = self._start
        self._turns_off = None if self._turns_off is None else [*self._start]

    def save(self, file: str | None = None) -> None:
        """Saves the memory in the server's folder, or downloads it to a file that `Session.load` reads."""
        self._require_memory()
        if file is None:
            self._asked("POST", f"/v1/memories/{self.memory}/save")
            return
        refuse_to_replace(file)
        with (
            self._response("GET", f"/v1/memories/{self.memory}/file") as response,
            new_file(file, ours=True) as partial,
            partial.open("wb") as out,
        ):
            shutil.copyfileobj(response, out)

    def fork(self, name: str) -> None:
        """Copies the memory on the server under another name."""
        self._require_memory()
        self._asked("POST", f"/v1/memories/{self.memory}/fork", {"to": name})

    def info(self) -> str:
        """Returns the sizes of the memory and of the conversation."""
        about = self._about()
        memory = (
            f"memory {self.memory}: {about.get('tokens', 0):,} tokens, {about.get('chunks', 0):,} chunks "
            f"written ({about.get('bytes', 0):,} bytes), {'saved' if about.get('saved') else 'not saved'}"
            if about
            else f"memory {self.memory} is empty"
            if self.memory
            else "no memory"
        )
        turns = len(self._turns) - len(self._start)
        return (
            f"{self._model} at {self.address}; {memory}; {turns} turns in the conversation; "
            f"TTT {'on' if self.is_on else 'off'}"
        )

    def summary(self) -> dict[str, Any]:
        """Returns the memory's sizes as a JSON object."""
        about = self._about()
        return {
            "server": self.address,
            "memory": self.memory,
            "tokens": about.get("tokens", 0),
            "chunks_written": about.get("chunks", 0),
            "state_bytes": about.get("bytes", 0),
        }

    def _about(self) -> dict[str, Any]:
        """Returns the server's description of the memory; empty if it does not exist yet."""
        if self.memory is None:
            return {}
        try:
            return self._asked("GET", f"/v1/memories/{self.memory}")
        except _NotFoundError:
            return {}

    def _require_memory(self) -> None:
        if not self._about():
            raise InPlaceTTTError(
                f"memory {self.memory} is empty; /read a file first."
                if self.memory
                else "this chat does not have a memory; start it with --memory NAME."
            )

    def _tokens(self, text: str) -> list[int]:
        return [
            int(token)
            for token in self._asked("POST", "/tokenize", {"model": self._model, "prompt": text})["tokens"]
        ]

    def _asked(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self._response(method, path, body) as response:
            try:
                found = json.load(response)
            except ValueError:
                found = None
        if not isinstance(found, dict):
            raise InPlaceTTTError(
                f"{self.address}{path} did not answer with JSON; give the address of `inplace-ttt serve`."
            )
        return found

    @contextmanager
    def _response(self, method: str, path: str, body: Any = None) -> Iterator[BinaryIO]:
        """Yields the response to a request. Its problems become sentences."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self.address}{path}", data, headers, method=method)
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                yield response
        except urllib.error.HTTPError as error:
            kind = _NotFoundError if error.code == 404 else InPlaceTTTError
            raise kind(f"{self.address} refused {method} {path}: {_message(error)}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", None)
            reason = str(reason) if reason else one_line(error)
            raise InPlaceTTTError(
                f"cannot reach the server at {self.address}: {reason}; start it with `inplace-ttt "
                "serve`, or correct the address."
            ) from None


class _NotFoundError(InPlaceTTTError):
    """Reports status 404."""


def _message(error: urllib.error.HTTPError) -> str:
    """Returns the sentence in a server's refusal: OpenAI's form, else the status."""
    try:
        found = json.loads(error.read())
        message = found["error"]["message"] if isinstance(found["error"], dict) else found["error"]
    except (ValueError, KeyError, TypeError, OSError, HTTPException):
        message = f"{error.code} {error.reason}"
    if error.code == 401:
        return f"{_line(message)}; give the server's key with --api-key."
    return _line(message)


def _line(message: Any) -> str:
    """Returns a server's message on one line of at most 400 characters."""
    return " ".join(str(message).split())[:400]


def _events(response: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events.

    Raises:
        InPlaceTTTError: if the server reports an error in the stream, or ends the stream early.
    """
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(data)
        if "error" in event:
            raise InPlaceTTTError(f"the server failed while it answered: {_line(event['error'])}")
        yield event
    raise InPlaceTTTError("the server ended while it answered; ask again.")
