"""What sampling adds to a step of a pair: the verification of four draft tokens, and the draft model's own draws.

Each model's logits are its predictions inside a text, which is also the history for penalties. By set of options:

    matching    five rows under seed-exact matching, all drafts accepted: the chain of each row and a draw from it
                (at temperature 0 under greedy verification: the chain and the argmax)
    rejection   five rows under rejection sampling, all drafts accepted: chain and acceptance, and a draw from the last
    rejected    one row whose draft token is rejected: chain, residual, and a draw from that
    drafting    four rows of the draft model: likewise

and besides argmax and log-probabilities of five rows. Each is a median over rounds that take every measurement once,
each second round in reverse, a forward of five rows and a draft step among them. `step` is the largest of the first
three over that forward, `draft` the fourth over four draft steps. Forwards run in all threads, sampling in one. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pilotfish import (
    DenseCache,
    Distribution,
    Draft,
    PilotfishError,
    SamplingParams,
    Tokenizer,
    catalog,
    check_pair,
    load,
)
from pilotfish.decode import SequenceState
from pilotfish.model import ForwardInput, run_forward
from pilotfish.model.batch import ForwardModel, prefill
from pilotfish.model.calibrate import Clock, Stopwatch, interleaved, medians, native_backend
from pilotfish.ops.native import argmax
from pilotfish.ops.sampling import greedy_token, gumbel_argmax, next_distribution, token_logprobs
from pilotfish.verify import GreedyVerifier, MatchingVerifier, RejectionVerifier, Verifier

TEXT = Path(__file__).with_name("accuracy.txt")
NUM_DRAFT_TOKENS = 4
NUM_ROWS = NUM_DRAFT_TOKENS + 1
CHUNK = 128
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
OPTIONS = {
    "temperature 1": SamplingParams(temperature=1.0, seed=0),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50, seed=0),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=0),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=0),
    "temperature 2, top_p 0.95": SamplingParams(temperature=2.0, top_p=0.95, seed=0),
    "penalties, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=0, **PENALTIES),
    "penalties, top_k 50, top_p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=0, **PENALTIES),
    "penalties, greedy": SamplingParams(**PENALTIES),
}
PARTS = ("matching", "rejection", "rejected", "drafting")
FORWARD, DRAFT_STEP = "forward of five rows", "draft step"
ARGMAX, LOGPROBS = "argmax of five rows", "log-probabilities of five rows, 20 likeliest"

Work = Callable[[], object]


def read_logits(model: ForwardModel, token_ids: list[int]) -> Tensor:
    """float32 [NUM_ROWS, vocab_size]: what the model says after each of the last tokens."""
    cache = DenseCache(model.config)
    prefill(model, cache, token_ids[:-NUM_ROWS], CHUNK)
    cache.reserve(NUM_ROWS)
    (logits,) = run_forward(model, [ForwardInput(cache, token_ids[-NUM_ROWS:], NUM_ROWS)])
    return logits


def verification(verifier: Verifier, sequence: SequenceState, draft: Draft, logits: Tensor, num_accepted: int) -> Work:
    """A verification to be timed, which must accept so many tokens."""
    accepted = verifier.verify(sequence, draft, logits).num_accepted_tokens
    if accepted != num_accepted:
        raise AssertionError(f"{verifier} accepted {accepted} draft tokens, where {num_accepted} should be timed")
    return partial(verifier.verify, sequence, draft, logits)


def parts(sequence: SequenceState, target: Tensor, draft: Tensor) -> dict[str, Work]:
    """What is timed for one request, from both models' logits."""
    agreed: tuple[int, ...] = ()
    verifier: Verifier = GreedyVerifier() if sequence.sampling.is_greedy else MatchingVerifier()
    while len(agreed) < NUM_DRAFT_TOKENS:  # what the target itself says after so many tokens of its own
        agreed += (verifier.verify(sequence, Draft(agreed), target[: len(agreed) + 1]).next_token_id,)

    def chain(logits: Tensor, row: int) -> Distribution:
        return next_distribution(logits[row], sequence.sampling, sequence.history, agreed[:row])

    def draw() -> None:
        for row in range(NUM_DRAFT_TOKENS):
            gumbel_argmax(chain(draft, row), sequence.noise_key, len(sequence.token_ids) + row)

    def choose() -> None:
        for row in range(NUM_DRAFT_TOKENS):
            greedy_token(draft[row], sequence.sampling, sequence.history, agreed[:row])

    work: dict[str, Work] = {
        "matching": verification(verifier, sequence, Draft(agreed), target, NUM_DRAFT_TOKENS),
        "drafting": choose if sequence.sampling.is_greedy else draw,
    }
    if not sequence.sampling.is_greedy:
        likely = Draft(agreed, tuple(chain(target, row) for row in range(NUM_DRAFT_TOKENS)))
        unlike = unlikely_draft(chain(target, 0), target[0])
        work["rejection"] = verification(RejectionVerifier(), sequence, likely, target, NUM_DRAFT_TOKENS)
        work["rejected"] = verification(RejectionVerifier(), sequence, unlike, target[:2], 0)
    return work


def unlikely_draft(p: Distribution, logits: Tensor) -> Draft:
    """The id that the target finds least likely, drawn from what else is p."""
    token_id = int(logits.argmin())
    token_ids = np.union1d(p.token_ids, np.array([token_id], np.int32))
    q = np.zeros(len(token_ids))
    q[np.searchsorted(token_ids, p.token_ids)] = p.probs / 2
    q[np.searchsorted(token_ids, token_id)] += 0.5
    return Draft((token_id,), (Distribution(token_ids, q),))


def measure(
    target: ForwardModel, draft: ForwardModel, tokenizer: Tokenizer, text: str, rounds: int, clock: Clock
) -> dict[str, Any]:
    token_ids = tokenizer.encode(text)
    logits, draft_logits = read_logits(target, token_ids), read_logits(draft, token_ids)
    sequences = {
        name: SequenceState(
            name, list(token_ids), DenseCache(target.config), sampling, frozenset(), target.config.context_length,
            tokenizer.detokenizer(),
        )
        for name, sampling in OPTIONS.items()
    }  # fmt: skip
    work: dict[Hashable, Work] = {
        (name, part): run
        for name, sequence in sequences.items()
        for part, run in parts(sequence, logits, draft_logits).items()
    }
    work[ARGMAX] = partial(argmax, logits)
    work[LOGPROBS] = partial(token_logprobs, logits, token_ids[:NUM_ROWS], 20)

    def timed(run: Work) -> float:
        start = clock()
        run()
        return clock() - start

    measurements: dict[Hashable, Callable[[], float]] = {key: partial(timed, run) for key, run in work.items()}
    measurements[FORWARD] = partial(Stopwatch(target, 64, clock=clock).forward, NUM_ROWS)
    measurements[DRAFT_STEP] = Stopwatch(draft, 64, clock=clock).draft_step
    interleaved(measurements, 1)
    seconds = medians(interleaved(measurements, rounds))
    costs = {name: {part: 1e3 * seconds[name, part] for part in PARTS if (name, part) in seconds} for name in sequences}
    step_shares = {
        name: max(each[part] for part in PARTS[:3] if part in each) / 1e3 / seconds[FORWARD]
        for name, each in costs.items()
    }
    draft_shares = {
        name: each["drafting"] / 1e3 / (NUM_DRAFT_TOKENS * seconds[DRAFT_STEP]) for name, each in costs.items()
    }
    return {
        "vocab_size": logits.shape[1],
        "history_tokens": len(token_ids),
        "rounds": rounds,
        "forward_ms": 1e3 * seconds[FORWARD],
        "draft_step_ms": 1e3 * seconds[DRAFT_STEP],
        "cost_ms": costs,
        "step_share": step_shares,
        "draft_share": draft_shares,
        "argmax_ms": 1e3 * seconds[ARGMAX],
        "logprobs_ms": 1e3 * seconds[LOGPROBS],
        "ids_left": {
            name: len(next_distribution(logits[-1], sequence.sampling, sequence.history).probs)
            for name, sequence in sequences.items()
            if not sequence.sampling.is_greedy
        },
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{NUM_ROWS} rows of {report['vocab_size']} logits, {report['history_tokens']} tokens of history; medians of "
        f"{report['rounds']} rounds; {FORWARD}: {report['forward_ms']:.1f} ms, {DRAFT_STEP}: "
        f"{report['draft_step_ms']:.1f} ms",
        f"{'ms':34}" + "".join(f"{part:>11}" for part in PARTS) + f"{'step':>8}{'draft':>8}   ids left in the last row",
    ]
    for name, costs in report["cost_ms"].items():
        cells = "".join(f"{costs[part]:11.2f}" if part in costs else f"{'':11}" for part in PARTS)
        shares = f"{report['step_share'][name]:8.1%}{report['draft_share'][name]:8.1%}"
        lines.append(f"{name:34}{cells}{shares}   {report['ids_left'].get(name, 1)}")
    lines += [f"{ARGMAX}: {report['argmax_ms']:.2f} ms", f"{LOGPROBS}: {report['logprobs_ms']:.2f} ms"]
    return "\n".join(lines)


def main() -> None:
    target, draft = catalog.default_pair()
    parser = argparse.ArgumentParser(description="Measure what sampling costs beside the forwards of a step.")
    parser.add_argument("--model", default=target, help=f"the target: a catalog name or a file ({target})")
    parser.add_argument("--draft-model", default=draft, help=f"the draft model, likewise ({draft})")
    parser.add_argument("--rounds", type=int, default=31, help="how often everything is measured (31)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        model, tokenizer = load(options.model, backend=native_backend())
        draft_model, draft_tokenizer = load(options.draft_model, backend=native_backend())
        text = TEXT.read_text("utf-8")
        check_pair(draft_tokenizer, tokenizer, text)
        report = measure(model, draft_model, tokenizer, text, options.rounds, time.perf_counter)
    except PilotfishError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not options.json:
        print(table(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
