"""Token ids of the books and questions that the tests over HTTP read."""

from __future__ import annotations

from serving.test_tokens import prompts

BOOKS = prompts(75, 130, 200, seed=11)
QUESTIONS = prompts(5, 20, 40, 70, seed=12)
