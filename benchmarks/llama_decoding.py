"""
Samples with llama.cpp for `decode_speed.py`, through the C interface that the package llama-cpp-python declares.

It runs in an environment that has llama_cpp, numpy and psutil, and neither turnwise nor torch.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LlamaDecoder:
    """
    A model in a GGUF file, computed by one thread, and one context of llama.cpp for all rows of a batch.

    The cache of keys and values and the attention have llama.cpp's defaults: float16, and flash attention where the
    processor has it. Every row has its own part of the cache. With `unified`, all rows share one buffer instead, and
    the attention of a row computes and masks the scores of all other rows.
    """

    def __init__(self, file: Path, max_context: int, *, unified: bool) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it prints every tensor otherwise
        self._api: Any = importlib.import_module("llama_cpp")
        self._max_context = max_context
        self._unified = unified
        self._num_rows = 0
        self._context: Any = None
        self._batch: Any = None
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(bytes(file), self._api.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        # The sampler `dist` draws from the softmax of the logits: that is temperature 1, without top-k and top-p.
        self._sampler = self._api.llama_sampler_chain_init(self._api.llama_sampler_chain_default_params())
        self._api.llama_sampler_chain_add(self._sampler, self._api.llama_sampler_init_dist(0))

    def decode(self, contexts: list[list[int]], num_tokens: int) -> int:
        """Sample a number of tokens after each context, all of one length; returns the number of sampled tokens."""
        rows, length = range(len(contexts)), len(contexts[0])
        if len(rows) != self._num_rows:
            self._start_context(len(rows), length)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        prompt = [(token, position, row) for row in rows for position, token in enumerate(contexts[row])]
        sampled = self._compute(prompt, [(row + 1) * length - 1 for row in rows])
        for position in range(length, length + num_tokens - 1):
            sampled = self._compute([(token, position, row) for row, token in enumerate(sampled)], rows)
        return len(rows) * num_tokens

    def _start_context(self, num_rows: int, length: int) -> None:
        """Replace the context by one for a number of rows, and the batch by one that holds all their prompts."""
        if self._context is not None:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
        parameters = self._api.llama_context_default_params()
        parameters.n_seq_max = num_rows
        parameters.n_ctx = num_rows * math.ceil(self._max_context / 256) * 256  # it warns of other sizes
        parameters.n_batch = num_rows * length
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.kv_unified = self._unified
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context for {num_rows} rows; its error is above")
        self._batch = self._api.llama_batch_init(num_rows * length, 0, 1)
        self._num_rows = num_rows

    def _compute(self, tokens: list[tuple[int, int, int]], outputs: Sequence[int]) -> list[int]:
        """Compute tokens, each with its position and its row; returns a sampled token for each index in `outputs`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = 0
        for index in outputs:
            batch.logits[index] = 1
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens returned {status}")
        return [self._api.llama_sampler_sample(self._sampler, self._context, index) for index in outputs]
