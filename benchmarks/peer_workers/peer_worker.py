"""A peer's side of a measurement: the counterpart of `pilotfish.bench.worker` in an environment without pilotfish.

Reads one JSON task, a line, from stdin, answers its prompts, and writes the same events. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """Output token ids, and seconds from the prompt's ids to the last token, and to the first where it tells."""

    token_ids: Sequence[int]
    seconds: float
    prefill_seconds: float | None = None


class Peer(Protocol):
    process_id: int
    """Of the process that holds the models."""

    def answer(self, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Greedy continuation; the token that ends it is the last one."""


def run(open_peer: Callable[[dict[str, Any]], Peer], prepare: Callable[[Path, Path, Path], None]) -> None:
    """Does what the command line says: `prepare TARGET DRAFT FOLDER`, or without arguments a task from stdin."""
    if sys.argv[1:]:
        _, *paths = sys.argv[1:]
        prepare(*map(Path, paths))
        return
    # What a library prints must not get between the events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(kind: str, **fields: object) -> None:
        print(json.dumps({"kind": kind, **fields}), file=events, flush=True)

    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    take_sample(task, open_peer, emit)


def _end_with_parent() -> None:
    """Nothing more comes through stdin, but its end, where whoever started this process is gone."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def take_sample(task: dict[str, Any], open_peer: Callable[[dict[str, Any]], Peer], emit: Callable[..., None]) -> None:
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    load_before = os.getloadavg()[0]
    emit("stage", text="loading")
    start = time.perf_counter()
    peer = open_peer(task)
    load_seconds = time.perf_counter() - start
    prompts = task["prompt_token_ids"]
    emit("stage", text="warming up")
    peer.answer(next(iter(prompts.values())), min(task["max_tokens"], task["warm_up_tokens"]))
    answers = []
    for prompt_id, token_ids in prompts.items():
        found = peer.answer(token_ids, task["max_tokens"])
        answers.append(
            {
                "prompt_id": prompt_id,
                "num_prompt_tokens": len(token_ids),
                "token_ids": list(found.token_ids),
                "finish_reason": "stop" if found.token_ids[-1] in task["eos_token_ids"] else "length",
                "end_to_end_seconds": found.seconds,
                "prefill_seconds": found.prefill_seconds,
            }
        )
        emit("answer", text=prompt_id, answer=answers[-1])
    sample = {
        "arm": task["arm"],
        "round": task["round"],
        "place": task["place"],
        "process_id": peer.process_id,
        "started_at": started_at,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
        "load_seconds": load_seconds,
        "peak_memory_bytes": _peak_memory_bytes(peer.process_id),
        "answers": answers,
    }
    emit("sample", sample=sample)


def _peak_memory_bytes(process_id: int) -> int:
    """The most memory that was resident in a process."""
    lines = Path(f"/proc/{process_id}/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
