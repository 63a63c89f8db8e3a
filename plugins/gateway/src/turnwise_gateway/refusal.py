"""The error of a call that has no answer."""

from __future__ import annotations


class CallRefusedError(Exception):
    """
    A call that a session does not answer; the dialects give each kind its status and its words.

    Kinds:

    - `session_closed`, `budget_exhausted`: 400; the episode is over, or it may sample no more.
    - `context_length_exceeded`: 400; the conversation has `num_tokens` tokens of at most `max_tokens`.
    - `unsupported`: 400; the field `param` would change what is sampled, and the engine cannot do it.
    - `grammar`: 400; the field `param` asks for a form whose grammar has failed in the engine.
    - `invalid`: 400; the field `param` is wrong.
    - `foreign_caller`: 403; the key belongs to another program.
    - `overloaded`: 429; the client may try again after `retry_after_s` seconds.
    - `endpoint`: 502, or a broken stream; another server, which has the model of this name, failed.
    - `engine`: 500, or a broken stream; the engine failed.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        num_tokens: int = 0,
        max_tokens: int = 0,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.retry_after_s = retry_after_s
