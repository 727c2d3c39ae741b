"""llama.cpp as a child process that measures itself on command, so that it and pilotfish never share a thread pool.

The parent writes one JSON line, `[method, *arguments]`, and reads one line with the result. In between this process
waits for its stdin, asleep. It does not import torch, whose OpenMP it might get instead of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence

import llama_cpp.llama_cpp as api
import numpy as np

_MAX_ROWS = 512  # of one forward


@api.llama_log_callback
def _silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


class LlamaCpp:
    """One model, with a context of its own for each context length that is asked for."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        """`repack` lets llama.cpp rearrange weights for this CPU, its default."""
        api.llama_log_set(_silent, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = threads
        self._batch = api.llama_batch_init(_MAX_ROWS, 0, 1)
        self._prefilled: dict[int, int] = {}
        self._scratch = self._new_context(2 * _MAX_ROWS)

    def forward(self, num_rows: int, context_length: int) -> float:
        """Seconds of a forward of `num_rows` rows behind `context_length` tokens, logits for each row."""
        if context_length not in self._prefilled:
            context = self._new_context(context_length + _MAX_ROWS)
            for first in range(0, context_length, _MAX_ROWS):
                self._decode(context, self._token_ids(min(_MAX_ROWS, context_length - first)), first, 0)
            self._prefilled[context_length] = context
        context = self._prefilled[context_length]
        start = time.perf_counter()
        self._decode(context, self._token_ids(num_rows), context_length, num_rows)
        seconds = time.perf_counter() - start
        api.llama_memory_seq_rm(api.llama_get_memory(context), 0, context_length, -1)
        return seconds

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one forward over a prompt of `num_tokens` tokens, logits for the last one."""
        self._clear_scratch()
        start = time.perf_counter()
        self._decode(self._scratch, self._token_ids(num_tokens), 0, 1)
        return time.perf_counter() - start

    def generate(self, prompt: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int]) -> tuple[int, float]:
        """Greedy decoding, one token a forward: tokens after the first, and their seconds."""
        self._clear_scratch()
        for first in range(0, len(prompt), _MAX_ROWS):
            chunk = prompt[first : first + _MAX_ROWS]
            self._decode(self._scratch, chunk, first, int(first + len(chunk) == len(prompt)))
        token_id = self._choose()
        count = 0
        start = time.perf_counter()
        while token_id not in eos_token_ids and count < max_tokens - 1:
            self._decode(self._scratch, [token_id], len(prompt) + count, 1)
            token_id = self._choose()
            count += 1
        return count, time.perf_counter() - start

    def _new_context(self, num_slots: int) -> int:
        params = api.llama_context_default_params()
        params.n_ctx = num_slots
        params.n_batch = params.n_ubatch = _MAX_ROWS
        params.n_threads = params.n_threads_batch = self._threads
        context = api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_slots} tokens")
        return context

    def _clear_scratch(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._scratch), False)

    def _decode(self, context: int, token_ids: Sequence[int], position: int, num_logits: int) -> None:
        if len(token_ids) > _MAX_ROWS:
            raise ValueError(f"{len(token_ids)} rows are more than {_MAX_ROWS}")
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for row, token_id in enumerate(token_ids):
            batch.token[row] = token_id
            batch.pos[row] = position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = row >= len(token_ids) - num_logits
        status = api.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")
        api.llama_synchronize(context)

    def _choose(self) -> int:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self._scratch, -1), shape=(self._vocab_size,))
        return int(logits.argmax())

    def _token_ids(self, num_tokens: int) -> list[int]:
        return [(31 * place + 17) % self._vocab_size for place in range(num_tokens)]


def main() -> None:
    path, threads, mode = sys.argv[1:]
    peer = LlamaCpp(path, int(threads), mode == "repacked")
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
