"""One fresh process, one sample: reads a `Task` from stdin, answers every prompt, writes what happens to stdout.

A line of stdout is one JSON `Event`. Everything that costs time before the first measured answer (imports, the
bandwidth probe, opening the models, the warm-up) is over when it begins.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Literal

from pydantic import Field

import pilotfish
import pilotfish.model.calibrate as calibrate
from pilotfish import Draft, Drafter, DraftRequest, SamplingParams, TextEvent, Tokenizer
from pilotfish.bench import host
from pilotfish.bench.artifact import Answer, Host, Margin, Mismatch, Part, Phases, Prompt, Sample, TokenChoice
from pilotfish.errors import PilotfishError, PromptError
from pilotfish.types import SequenceView, VerifyOutcome

WARM_UP_TOKENS = 32
WARM_UP = f"in each process the first prompt, at most {WARM_UP_TOKENS} tokens, not counted"
CLOCK = (
    "from before the prompt is encoded until the last token is out, both prefills included; forwards on the CPU are "
    "over when they return, so that nothing has to be waited for"
)
_BANDWIDTH_PASSES = 5


class Task(Part):
    """What one process is to do: take a sample, see whether all can be run, or explain a mismatch."""

    purpose: Literal["sample", "check", "explain"] = "sample"

    arm: str
    round: int
    place: int
    model: str
    draft_model: str | None
    """None for target-only."""
    proposal_length: int
    max_tokens: int
    threads: int | None
    prompts: list[Prompt]
    mismatch: Mismatch | None = None
    """To be explained, for the one prompt."""
    common_token_ids: list[int] = Field(default_factory=list)
    """The output before the mismatch."""


class Event(Part):
    """What a process tells: what it is at, an answer, its result, or why there is none."""

    kind: Literal["stage", "answer", "sample", "mismatch", "error"]
    text: str = ""
    answer: Answer | None = None
    sample: Sample | None = None
    host: Host | None = None
    mismatch: Mismatch | None = None


Emit = Callable[[Event], None]


class RecordingDrafter:
    """Passes everything on to a drafter, and keeps how long each proposal was and how much of it was accepted."""

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self.num_draft_tokens: list[int] = []
        self.num_accepted_tokens: list[int] = []
        self._drafter = drafter
        self._proposed = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._drafter.propose(requests)
        (draft,) = drafts  # one sequence at a time here
        self._proposed = bool(draft.token_ids)
        if self._proposed:
            self.num_draft_tokens.append(len(draft.token_ids))
        return drafts

    def observe(self, sequence: SequenceView, outcome: VerifyOutcome) -> None:
        if self._proposed:
            self.num_accepted_tokens.append(outcome.num_accepted_tokens)
        self._proposed = False
        self._drafter.observe(sequence, outcome)

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)


def measure_bandwidth(threads: int | None, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second of the best of a few passes over memory, which is free again afterwards."""
    probe = calibrate.machine_probe(calibrate.native_backend(threads))
    return max(calibrate.read_bandwidth(probe, clock) for _ in range(_BANDWIDTH_PASSES))


def run_task(task: Task, emit: Emit, clock: Callable[[], float] = time.perf_counter) -> None:
    """Does what `task` is for."""
    if task.purpose == "sample":
        take_sample(task, emit, clock)
    elif task.purpose == "check":
        check(task)
    else:
        explain_mismatch(task, emit)


def check(task: Task) -> None:
    """Raises what a sample would raise, `PromptError` with the prompt's id among it; tells nothing otherwise."""
    calibrate.native_backend(task.threads)
    model, tokenizer = pilotfish.load(task.model, threads=task.threads)
    if task.draft_model is not None:
        pilotfish.check_pair(pilotfish.load(task.draft_model, threads=task.threads)[1], tokenizer)
    limit = model.config.context_length
    for prompt in task.prompts:
        try:
            count = len(tokenizer.encode_chat(prompt.messages))
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id!r}: {error}") from None
        if count >= limit:
            raise PromptError(
                f"prompt {prompt.id!r} has {count} tokens, which leaves no room in the target's context of {limit}: "
                "shorten it"
            )


def take_sample(task: Task, emit: Emit, clock: Callable[[], float] = time.perf_counter) -> None:
    """Answers the prompts of `task` in this process. The last event is the sample, with the host."""
    backend = calibrate.native_backend(task.threads)
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    load_before = host.load_average()
    emit(Event(kind="stage", text="measuring the bandwidth"))
    bandwidth = measure_bandwidth(task.threads, clock)
    host.reset_peak_memory()
    emit(Event(kind="stage", text="loading"))
    start = clock()
    model, tokenizer = pilotfish.load(task.model, threads=task.threads)
    drafter = None
    if task.draft_model is not None:
        draft_model, draft_tokenizer = pilotfish.load(task.draft_model, threads=task.threads)
        drafter = pilotfish.DraftModelDrafter(
            draft_model, pilotfish.check_pair(draft_tokenizer, tokenizer), clock=clock
        )
    load_seconds = clock() - start

    def answer(prompt: Prompt, max_tokens: int) -> Answer:
        return _answer(model, tokenizer, drafter, prompt, task.proposal_length, max_tokens, clock)

    emit(Event(kind="stage", text="warming up"))
    answer(task.prompts[0], min(task.max_tokens, WARM_UP_TOKENS))
    emit(Event(kind="stage", text="answering"))
    answers = []
    for prompt in task.prompts:
        answers.append(answer(prompt, task.max_tokens))
        emit(Event(kind="answer", text=prompt.id, answer=answers[-1]))
    sample = Sample(
        arm=task.arm,
        round=task.round,
        place=task.place,
        process_id=os.getpid(),
        started_at=started_at,
        bandwidth_bytes_per_second=bandwidth,
        load_average_before=load_before,
        load_average_after=host.load_average(),
        load_seconds=load_seconds,
        peak_memory_bytes=host.peak_memory_bytes(),
        answers=answers,
    )
    described = host.describe_host(backend.isa, calibrate.num_usable_cores(), backend.threads)
    emit(Event(kind="sample", sample=sample, host=described))


def _answer(
    model: calibrate.WeighedModel,
    tokenizer: Tokenizer,
    drafter: Drafter | None,
    prompt: Prompt,
    proposal_length: int,
    max_tokens: int,
    clock: Callable[[], float],
) -> Answer:
    recorder = None if drafter is None else RecordingDrafter(drafter)
    sampling = SamplingParams(max_tokens=max_tokens)
    start = clock()
    events = pilotfish.stream(
        model,
        tokenizer,
        prompt.messages,
        drafter=recorder,
        proposal_length=proposal_length,
        sampling=sampling,
        clock=clock,
    )
    with events:
        moments = [clock() for event in events if isinstance(event, TextEvent)]
    result, stats = events.result, events.result.stats
    seconds = moments[-1] - start
    phases = (stats.draft_seconds, stats.target_seconds, stats.verify_seconds, stats.cache_seconds)
    return Answer(
        prompt_id=prompt.id,
        num_prompt_tokens=stats.num_prompt_tokens,
        token_ids=list(result.token_ids),
        finish_reason=result.finish_reason,
        end_to_end_seconds=seconds,
        prefill_seconds=moments[0] - start,
        num_steps=stats.num_steps,
        num_draft_tokens=[] if recorder is None else recorder.num_draft_tokens,
        num_accepted_tokens=[] if recorder is None else recorder.num_accepted_tokens,
        draft_prefill_seconds=stats.draft_prefill_seconds,
        phases=Phases(
            draft_seconds=stats.draft_seconds,
            target_seconds=stats.target_seconds,
            verification_seconds=stats.verify_seconds,
            cache_maintenance_seconds=stats.cache_seconds,
            other_seconds=seconds - sum(phases),
        ),
    )


def explain_mismatch(task: Task, emit: Emit) -> None:
    """Emits the mismatch of `task` with its tokens' texts, and what the target says there."""
    model, tokenizer = pilotfish.load(task.model, threads=task.threads)
    (prompt,), mismatch = task.prompts, task.mismatch
    logits = pilotfish.next_token_logits(model, [*tokenizer.encode_chat(prompt.messages), *task.common_token_ids])
    values, token_ids = logits.sort(descending=True, stable=True)

    def choice(token_id: int) -> TokenChoice:
        return TokenChoice(token_id=token_id, text=tokenizer.decode([token_id]))

    margin = Margin(
        first=choice(int(token_ids[0])),
        first_logit=float(values[0]),
        second=choice(int(token_ids[1])),
        second_logit=float(values[1]),
    )
    assert mismatch is not None
    expected, found = (
        None if token is None else choice(token.token_id) for token in (mismatch.expected, mismatch.found)
    )
    update = {"expected": expected, "found": found, "margin": margin}
    emit(Event(kind="mismatch", mismatch=mismatch.model_copy(update=update)))


def _end_with_parent() -> None:
    """Nothing more comes through stdin, but its end, where whoever started this process is gone."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> None:
    # What a library prints must not get between the events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(event: Event) -> None:
        print(event.model_dump_json(), file=events, flush=True)

    try:
        task = Task.model_validate_json(sys.stdin.readline())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        run_task(task, emit)
    except PilotfishError as error:
        emit(Event(kind="error", text=str(error)))
        sys.exit(2)


if __name__ == "__main__":
    main()
