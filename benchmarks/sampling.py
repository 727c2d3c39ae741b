"""What sampling adds to a verification step: the chain, the noise and log-probabilities for five rows of real logits.

The rows are the target's own predictions inside a text that is also the history for penalties. Each cost is a median
over rounds that take every measurement once, each second round in reverse, a five-row forward of the target among them;
`share` is the cost over that forward. Everything here runs in one thread. The last line of stdout is one JSON object.
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

from torch import Tensor

from pilotfish import DenseCache, PilotfishError, SamplingParams, catalog, load
from pilotfish.model import ForwardInput, run_forward
from pilotfish.model.batch import prefill
from pilotfish.model.calibrate import Clock, Stopwatch, interleaved, medians, native_backend
from pilotfish.ops.native import argmax
from pilotfish.ops.sampling import TokenHistory, distributions, gumbel_argmax, noise_key, token_logprobs

TEXT = Path(__file__).with_name("accuracy.txt")
NUM_ROWS = 5
CHUNK = 128
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
CHAINS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "temperature 2, top_p 0.95": SamplingParams(temperature=2.0, top_p=0.95),
    "penalties, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, **PENALTIES),
    "penalties, top_k 50, top_p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, **PENALTIES),
    "penalties, greedy": SamplingParams(**PENALTIES),
}
FORWARD = "forward of five rows"


def read_logits(model: Any, token_ids: list[int]) -> Tensor:
    """float32 [NUM_ROWS, vocab_size]: what the model says after each of the last tokens."""
    cache = DenseCache(model.config)
    prefill(model, cache, token_ids[:-NUM_ROWS], CHUNK)
    cache.reserve(NUM_ROWS)
    (logits,) = run_forward(model, [ForwardInput(cache, token_ids[-NUM_ROWS:], NUM_ROWS)])
    return logits


def measure(model: Any, token_ids: list[int], rounds: int, clock: Clock = time.perf_counter) -> dict[str, Any]:
    logits, history, draft = read_logits(model, token_ids), TokenHistory([]), token_ids[: NUM_ROWS - 1]
    for token_id in token_ids:
        history.append(token_id)
    key = noise_key(0)

    def chain(sampling: SamplingParams, draws: bool = False) -> None:
        for position, found in enumerate(distributions(logits, sampling, history, draft)):
            if draws:
                gumbel_argmax(found, key, position)

    def timed(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return clock() - start

    costs: dict[str, Callable[[], object]] = {name: partial(chain, sampling) for name, sampling in CHAINS.items()}
    costs |= {f"{name}, a draw": partial(chain, CHAINS[name], True) for name in ("temperature 1", "top_p 0.95")}
    costs["argmax"] = partial(argmax, logits)
    costs["log-probabilities, 20 likeliest"] = partial(token_logprobs, logits, token_ids[:NUM_ROWS], 20)
    measurements: dict[Hashable, Callable[[], float]] = {name: partial(timed, work) for name, work in costs.items()}
    measurements[FORWARD] = partial(Stopwatch(model, 64).forward, NUM_ROWS)
    interleaved(measurements, 1)
    seconds = medians(interleaved(measurements, rounds))
    survivors = {
        name: [len(found.probs) for found in distributions(logits, sampling, history, draft)]
        for name, sampling in CHAINS.items()
    }
    return {
        "vocab_size": logits.shape[1],
        "history_tokens": len(token_ids),
        "rounds": rounds,
        "forward_ms": 1e3 * seconds[FORWARD],
        "cost_ms": {name: 1e3 * seconds[name] for name in costs},
        "share": {name: seconds[name] / seconds[FORWARD] for name in costs},
        "survivors": survivors,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{NUM_ROWS} rows of {report['vocab_size']} logits, {report['history_tokens']} tokens of history; medians of "
        f"{report['rounds']} rounds; {FORWARD}: {report['forward_ms']:.1f} ms",
        f"{'':34}{'ms':>8}{'share':>9}   ids left in each row",
    ]
    for name, cost in report["cost_ms"].items():
        counts = ", ".join(map(str, report["survivors"].get(name, ())))
        lines.append(f"{name:34}{cost:8.2f}{report['share'][name]:9.1%}   {counts}")
    return "\n".join(lines)


def main() -> None:
    target = catalog.default_pair()[0]
    parser = argparse.ArgumentParser(description="Measure what sampling costs beside a forward of five rows.")
    parser.add_argument("--model", default=target, help=f"a catalog name or a file ({target})")
    parser.add_argument("--rounds", type=int, default=31, help="how often everything is measured (31)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        model, tokenizer = load(options.model, backend=native_backend())
        report = measure(model, tokenizer.encode(TEXT.read_text("utf-8")), options.rounds)
    except PilotfishError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not options.json:
        print(table(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
