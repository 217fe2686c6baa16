"""RULER and BABILong as tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task as HarnessTask
from lm_eval.config.task import TaskConfig
from lm_eval.filters import build_filter_ensemble

from ...errors import InPlaceTTTError
from ..prompt import Prompter, Task, samples
from .names import TASKS, Texts

SCORE = "score"
"""Name of the metric, from 0 to 1."""


class GeneratedTask(HarnessTask):
    """A task of lm-eval whose documents are made when they are first needed.

    A document is {input, tokens, answers, options, guesses}. Its input is the complete prompt, also in the
    chat template. So neither a system prompt nor solved examples are added.

    Args:
        task: the task.
        length: length of prompt and answer, in tokens.
        count: number of documents.
        seed: seed of the documents.
        material: texts that the documents are made of.
        prompter: turns drafts into token ids.
    """

    OUTPUT_TYPE = "generate_until"
    VERSION = 1

    def __init__(
        self, task: Task, length: int, count: int, seed: int, material: Any, prompter: Prompter
    ) -> None:
        # not lm-eval's own, which warns about a config without settings of generation
        self._made = task, length, count, seed, material, prompter
        self._instances: list[Instance] | None = None
        self.fewshot_rnd = None
        self._filters = [build_filter_ensemble("none", [["take_first", None]])]
        greedy = {"until": [], "max_gen_toks": task.budget, "do_sample": False}
        self._config = TaskConfig(task=f"{task.name}-{length}", num_fewshot=0, generation_kwargs=greedy)

    @cached_property
    def _documents(self) -> list[dict[str, Any]]:
        prompter = self._made[-1]
        return [
            {
                "input": prompter.text(sample.draft),
                "tokens": len(sample.ids),
                "answers": sample.draft.answers,
                "options": sample.draft.options,
                "guesses": sample.draft.guesses,
            }
            for sample in samples(*self._made)
        ]

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        return self._documents

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return doc["input"]

    def doc_to_target(self, doc: dict[str, Any]) -> list[str]:
        return list(doc["answers"])

    def build_all_requests(
        self, *, limit: int | None = None, rank: int = 0, world_size: int = 1, **settings: Any
    ) -> None:
        """Makes one request of each document."""
        picked = settings.get("samples")
        documents = self.doc_iterator(rank=rank, limit=limit, world_size=world_size, samples=picked)
        self._instances = [
            self.construct_requests(doc, doc["input"], metadata=(self.task_name, number, 1))
            for number, doc in documents
        ]

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        arguments = (ctx, self.config.generation_kwargs)
        return Instance(request_type=self.OUTPUT_TYPE, doc=doc, arguments=arguments, idx=0, **kwargs)

    def process_results(self, doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
        return {SCORE: self._made[0].score(results[0], doc["answers"], doc["options"])}

    def aggregation(self) -> dict[str, Any]:
        return {SCORE: mean}

    def higher_is_better(self) -> dict[str, bool]:
        return {SCORE: True}


def lm_eval_tasks(
    names: Sequence[str],
    lengths: Sequence[int],
    tokenizer: Any,
    *,
    texts: Sequence[str] = (),
    questions: Sequence[str] = (),
    samples: int = 100,
    seed: int = 0,
    chat: bool = False,
) -> list[GeneratedTask]:
    """Makes tasks for lm-eval's `simple_evaluate`: each named task at each length.

    Args:
        names: names such as "ruler_fwe" or "babilong_qa1".
        lengths: lengths of prompt and answer, in tokens.
        tokenizer: the model's tokenizer.
        texts: files or folders with the text around needles and facts.
        questions: question files of ruler_qa_1 and ruler_qa_2.
        samples: documents per task and length.
        seed: seed of the documents.
        chat: put the prompts into the tokenizer's chat template.

    Returns:
        The tasks, named like "ruler_fwe-4096". Their metric is "score", from 0 to 1.

    Raises:
        InPlaceTTTError: if a name is unknown, or a text or question file is missing.

    Examples:
        Score a model in transformers, whose prompts `HFLM` reads in one piece:

            tasks = lm_eval_tasks(["ruler_fwe"], [1024], tokenizer, samples=20)
            lm_eval.simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer), tasks=tasks)
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise InPlaceTTTError(f"task {unknown[0]!r} does not exist; choose from {', '.join(TASKS)}.")
    prompter, given = Prompter(tokenizer, chat), Texts(tuple(texts), tuple(questions))
    return [
        GeneratedTask(TASKS[name], length, samples, seed, given.of(TASKS[name]), prompter)
        for length in lengths
        for name in names
    ]
