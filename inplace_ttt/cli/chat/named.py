"""Sessions by name: the files of a folder, whose turns follow one another on one model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, RLock, Thread

from ...errors import InPlaceTTTError, shown
from ...serving.memory import check_name
from ..messages import heard, sentence_of
from . import transcript
from .conversation import Conversation, HalfwayError
from .terminal import Stop
from .transcript import Entry

ENDING = ".session"
FIRST = "first"
_KEPT = 4
"""Sessions that stay in memory after their last turn."""


class Turn:
    """One piece of work on a session, in a thread of its own.

    Attributes:
        stop: ends it after the present step.
        ended: set at its end.
        label: the present step.
        read: tokens of a file read so far.
        total: tokens of that file; 0 while no file is read.
        error: a sentence if it failed, or "".
    """

    def __init__(self) -> None:
        self.stop, self.ended = Stop(), Event()
        self.label, self.read, self.total = "waiting for the turn of another session", 0, 0
        self.error = ""


class Named:
    """A session of the folder, in memory.

    Attributes:
        name: its name.
        conversation: continues it.
        entries: its transcript.
        turn: the present turn, or the last one.
        info: its sizes before the present turn.
        problem: sentence about the last turn, or "".
        version: changes with every change of the transcript.
    """

    def __init__(self, name: str, conversation: Conversation, entries: list[Entry], problem: str) -> None:
        self.name, self.conversation, self.entries, self.problem = name, conversation, entries, problem
        self.turn: Turn | None = None
        self.info, self.tokens, self.version = conversation.info(), conversation.tokens, 0

    @property
    def is_busy(self) -> bool:
        """True while a turn waits or runs."""
        return self.turn is not None and not self.turn.ended.is_set()


Work = Callable[[Named, Turn], None]


class Sessions:
    """The sessions of a folder.

    Args:
        folder: holds NAME.session and its transcript, NAME.json.
        opened: returns the conversation in a file, or a new one if the file does not exist.
    """

    def __init__(self, folder: Path, opened: Callable[[str], Conversation]) -> None:
        self.folder, self._opened = folder, opened
        self._held: OrderedDict[str, Named] = OrderedDict()
        self._problems: dict[str, str] = {}
        self._table = RLock()
        self._model = Lock()
        """Held by the turn that computes."""

    def names(self) -> list[str]:
        """Returns the names of all sessions."""
        return sorted(file.stem for file in self.folder.glob(f"*{ENDING}"))

    def first(self) -> str:
        """Returns the session that was saved last; makes one in an empty folder."""
        with self._table:
            files = list(self.folder.glob(f"*{ENDING}"))
            if files:
                return max(files, key=lambda file: file.stat().st_mtime_ns).stem
            return self.new(FIRST)

    def new(self, name: str) -> str:
        """Makes an empty session.

        Raises:
            InPlaceTTTError: if the name is refused or taken, or the session cannot be saved.
        """
        with self._table:
            file = self._free(name)
            conversation = self._opened(str(file))
            transcript.save(self._transcript(name), [])
            conversation.save()
            self._keep(Named(name, conversation, [], ""))
        return name

    def get(self, name: str) -> Named:
        """Returns a session, which is read from its file unless it is in memory.

        Raises:
            InPlaceTTTError: if there is none of that name, or its file is damaged or of another model.
        """
        with self._table:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name]
            if name not in self.names():
                raise InPlaceTTTError(f"there is no session {shown(name)} in {self.folder}; choose one.")
            conversation = self._opened(str(self._file(name)))
            problem = self._problems.pop(name, "")
            try:
                entries = transcript.load(self._transcript(name))
            except InPlaceTTTError as error:
                entries, problem = [], str(error)
            return self._keep(Named(name, conversation, entries, problem))

    def ask(self, name: str, question: str, both: bool) -> None:
        """Begins to answer a question.

        Args:
            name: of the session.
            question: of the user.
            both: answer it without the fast weights too, from the same tokens.
        """

        def work(named: Named, turn: Turn) -> None:
            conversation = named.conversation
            entry = Entry(question, "", "" if both else None)
            named.entries.append(entry)
            turn.label = "answering"
            before = None
            if both:
                conversation.switch(False)
                before = conversation.aside
                conversation.switch(True)

            def write(piece: str) -> None:
                entry.answer = (entry.answer or "") + piece
                named.version += 1

            try:
                entry.answer = conversation.answer(question, turn.stop, write)
            except BaseException:
                named.entries.pop()
                raise
            try:
                self._save(named)
                if both and not turn.stop.asked:
                    turn.label = "answering without the fast weights"
                    self._answer_without(named, turn, entry, before)
            finally:
                entry.without = entry.without or None

        self._start(name, work)

    def read(self, name: str, texts: list[tuple[str, str]]) -> None:
        """Begins to read texts into a session.

        Args:
            name: of the session.
            texts: file names and their texts.
        """

        def work(named: Named, turn: Turn) -> None:
            for file, text in texts:
                turn.label, turn.read, turn.total = f"reading {file}", 0, 0

                def advance(read: int, total: int) -> None:
                    turn.read, turn.total = read, total

                written = named.conversation.chunks_written
                read = named.conversation.read(text, file, turn.stop, advance)
                written = named.conversation.chunks_written - written
                stopped = "stopped: " if turn.stop.asked else ""
                note = f"{stopped}read {read:,} tokens of {file}, wrote {written:,} chunks"
                named.entries.append(Entry(note))
                self._save(named)
                if turn.stop.asked:
                    break

        self._start(name, work)

    def drop(self, name: str) -> None:
        """Drops a session's KV cache."""

        def work(named: Named, turn: Turn) -> None:
            named.conversation.drop()
            named.entries.append(Entry("the KV cache is empty, and the fast weights are kept"))
            self._save(named)

        self._wait(name, work)

    def forget(self, name: str) -> None:
        """Starts a session anew, with an empty transcript."""

        def work(named: Named, turn: Turn) -> None:
            named.conversation.forget()
            named.entries.clear()
            self._save(named)

        self._wait(name, work)

    def save(self, name: str) -> None:
        """Saves a session, which turns do by themselves."""
        self._wait(name, lambda named, turn: self._save(named))

    def fork(self, name: str, copy: str) -> None:
        """Saves a copy of a session under another name.

        Raises:
            InPlaceTTTError: if the name is refused or taken.
        """
        file = self._free(copy)

        def work(named: Named, turn: Turn) -> None:
            transcript.save(self._transcript(copy), named.entries)
            named.conversation.fork(str(file))

        self._wait(name, work)

    def stop(self, name: str) -> None:
        """Stops the present turn of a session after its present step."""
        with self._table:
            if name in self._held and (turn := self._held[name].turn) is not None:
                turn.stop.asked = True

    def close(self) -> None:
        """Stops all turns and waits until they are saved."""
        with self._table:
            turns = [named.turn for named in self._held.values() if named.turn is not None]
        for turn in turns:
            turn.stop.asked = True
        for turn in turns:
            turn.ended.wait()

    def _answer_without(self, named: Named, turn: Turn, entry: Entry, before: object) -> None:
        """Answers a question in a copy of the session that was made before its turn."""
        conversation = named.conversation

        def write(piece: str) -> None:
            entry.without = (entry.without or "") + piece
            named.version += 1

        conversation.aside = before  # type: ignore[assignment]
        try:
            entry.without = conversation.answer(entry.text, turn.stop, write)
        finally:
            conversation.switch(True)
        transcript.save(self._transcript(named.name), named.entries)

    def _start(self, name: str, work: Work) -> Turn:
        """Starts a turn.

        Raises:
            InPlaceTTTError: if the session has one already.
        """
        with self._table:
            named = self.get(name)
            if named.is_busy:
                raise InPlaceTTTError(f"{name} is still busy; wait, or press Stop.")
            turn = named.turn = Turn()
            named.problem = ""
        Thread(target=self._run, args=(named, turn, work), daemon=True).start()
        return turn

    def _wait(self, name: str, work: Work) -> None:
        """Runs a turn to its end.

        Raises:
            InPlaceTTTError: if it fails.
        """
        turn = self._start(name, work)
        turn.ended.wait()
        if turn.error:
            raise InPlaceTTTError(turn.error)

    def _run(self, named: Named, turn: Turn, work: Work) -> None:
        with self._model, heard() as warnings:
            try:
                if turn.stop.asked:
                    raise InPlaceTTTError("stopped before it began.")
                work(named, turn)
            except InPlaceTTTError as error:
                turn.error = str(error)
                if isinstance(error, HalfwayError):
                    self._end(named, turn)
            except Exception as error:
                turn.error = sentence_of(error)
                self._end(named, turn)
            named.problem = " ".join(filter(None, [turn.error, *warnings]))
            named.info, named.tokens = named.conversation.info(), named.conversation.tokens
            named.version += 1
            turn.ended.set()

    def _end(self, named: Named, turn: Turn) -> None:
        """Ends a session that failed halfway. Its file holds the turn before, and is read again."""
        turn.error += f" The session {named.name} goes on as it was saved last."
        with self._table:
            self._held.pop(named.name, None)
            self._problems[named.name] = turn.error

    def _save(self, named: Named) -> None:
        named.conversation.is_saved = False
        named.conversation.save()
        transcript.save(self._transcript(named.name), named.entries)

    def _keep(self, named: Named) -> Named:
        """Holds a session in memory, and lets go of those used longest ago."""
        self._held[named.name] = named
        for old in list(self._held.values())[:-_KEPT]:
            if not old.is_busy and old.conversation.is_saved:
                del self._held[old.name]
        return named

    def _free(self, name: str) -> Path:
        """Returns the file for a new session."""
        file = self._file(check_name(name))
        if file.exists():
            raise InPlaceTTTError(f"there is a session {name} already; choose it, or give another name.")
        return file

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{ENDING}"

    def _transcript(self, name: str) -> Path:
        return self.folder / f"{name}.json"
