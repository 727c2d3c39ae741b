"""Measures what a step costs, against what this machine can do and against llama.cpp, all in one run.

Times are medians over rounds that take every measurement once, each second round in reverse (see
`pilotfish.model.calibrate`), so that pilotfish, llama.cpp and the machine's limits are seen under the same conditions.
The last line of stdout is one JSON object:

    floor_ratio             M → T(M) / floor(M), with floor(M) = max(bytes / bandwidth, M · MACs / our 64-row rate) and
                            the bandwidth of the moment, taken beside each forward
    t_ratio                 M → T(M) / T(1)
    peak_share_64           our 64-row rate over the integer peak
    decode_vs_llamacpp      llama.cpp's T(1) over ours: above 1 pilotfish is quicker; so in all that follow
    verify5_vs_llamacpp     likewise T(5)
    prefill_vs_llamacpp     likewise a prompt of 300 tokens
    speculative_vs_llamacpp decode tokens/s of the pair at k = 4 over llama.cpp's with the target, on the code prompts

T(M) is a forward of M rows with logits for each, behind 64 tokens. llama.cpp runs with its weights repacked and as they
are in the file, and counts with the better of the two each time; without `llama-cpp-python` (see
requirements-peers.txt) those figures are null.

With `--shape` the pair has random weights in the shapes of a real one. Then nothing is generated and nobody else runs:
the object holds T(M), its ratios and floors as above, the draft step, loading, and what speedup those times allow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

import random_models

import pilotfish
from pilotfish import DraftModelDrafter, SamplingParams, _kernels, catalog
from pilotfish.bench.roofline import allowed_speedup, run_roofline
from pilotfish.errors import OptionError, PilotfishError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.loading import find_model
from pilotfish.model.calibrate import (
    Clock,
    ForwardTimes,
    ForwardWork,
    MachineLimits,
    Probe,
    Stopwatch,
    WithLimits,
    floor_ratio,
    forward_work,
    interleaved,
    machine_probe,
    medians,
    native_backend,
)
from pilotfish.ops.native import NativeBackend

ROW_COUNTS = {64: (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64), 2048: (1, 5)}  # by context length
PREFILL_TOKENS = 300
PROPOSAL_LENGTH = 4
MAX_TOKENS = 96
GENERATION_ROUNDS = 3
PROFILED_STEPS = 21
# How long an idle OpenMP thread spins before it sleeps is a few milliseconds.
SETTLE_SECONDS = 0.05
PROMPTS = Path(pilotfish.__file__).parent / "bench/prompts.json"
MODES = ("repacked", "plain")
SHAPE_ACCEPTANCES = (0.6, 0.75, 0.9)

Result = TypeVar("Result")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class PeerError(PilotfishError):
    """llama.cpp's process ended; what it said stands above."""


class LlamaCppPeer(AbstractContextManager["LlamaCppPeer"]):
    """A child process with llama.cpp; see llama_cpp_peer.py."""

    def __init__(self, path: Path, threads: int, mode: str) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [sys.executable, str(script), str(path), str(threads), mode]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, method: str, *arguments: object) -> Any:
        """What the method returns there."""
        with suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("llama.cpp's process ended; what it said stands above")
        return json.loads(line)

    def __exit__(self, *exception: object) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Turns:
    """Lets one party's threads fall asleep before another works, whose own are first woken by an uncounted step."""

    def __init__(self, sleep: Callable[[float], object] = time.sleep) -> None:
        self._party: object = None
        self._sleep = sleep

    def take(self, party: object, wake: Callable[[], object], measure: Callable[[], float]) -> float:
        if party is not self._party:
            self._sleep(SETTLE_SECONDS)
            wake()
            self._party = party
        return measure()


class TimedKernels:
    """The extension, with the time inside its functions, and its objects' methods, added up."""

    def __init__(self, kernels: object, clock: Clock = time.perf_counter) -> None:
        self._kernels = kernels
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        member = getattr(self._kernels, name)
        timed = self.timed(member)
        made = (lambda *arguments: TimedObject(self, timed(*arguments))) if isinstance(member, type) else timed
        setattr(self, name, made)
        return made

    def timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            plain = [argument.wrapped if isinstance(argument, TimedObject) else argument for argument in arguments]
            start = self.clock()
            result = function(*plain)
            self.seconds += self.clock() - start
            self.calls += 1
            return result

        return call


class TimedObject:
    """One object of the extension."""

    def __init__(self, kernels: TimedKernels, wrapped: object) -> None:
        self._kernels = kernels
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> object:
        member = getattr(self.wrapped, name)
        if not callable(member):
            return member
        timed = self._kernels.timed(member)
        setattr(self, name, timed)
        return timed


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def load_and_generate(target: Path, draft: Path) -> dict[str, float]:
    """Seconds that loading the pair takes, and the most memory resident until it has generated a little."""
    start = time.perf_counter()
    model, tokenizer = pilotfish.load(target)
    draft_model, draft_tokenizer = pilotfish.load(draft)
    seconds = time.perf_counter() - start
    pilotfish.speculative_generate(draft_model, model, draft_tokenizer, tokenizer, "def merge(a, b):\n", max_tokens=16)
    status = Path("/proc/self/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    bound = 1.25 * (target.stat().st_size + draft.stat().st_size) + 400e6
    return {"load_seconds": seconds, "peak_memory_bytes": 1024 * kilobytes, "peak_memory_bound_bytes": bound}


def dispatch_shares(target: Path, draft: Path) -> dict[str, float]:
    """The share of a one-row target step and of a draft step that passes outside the kernels."""
    backend = native_backend()
    timed = TimedKernels(_kernels)
    profiled = NativeBackend(timed, backend.isa, backend.threads)
    target_steps = Stopwatch(pilotfish.load(target, backend=profiled)[0], 64)
    draft_steps = Stopwatch(pilotfish.load(draft, backend=profiled)[0], 64, choose=profiled.argmax)
    return {
        "dispatch_share_target_step": outside_share(timed, partial(target_steps.forward, 1)),
        "dispatch_share_draft_step": outside_share(timed, draft_steps.draft_step),
    }


def outside_share(timed: TimedKernels, step: Callable[[], float]) -> float:
    """The median share of `step` outside the kernels, less what timing them costs."""
    cost_inside, cost_in_all = timing_costs(timed.clock)
    shares = []
    for _ in range(PROFILED_STEPS):
        timed.reset()
        seconds = step()
        inside = timed.seconds - timed.calls * cost_inside
        shares.append(1 - inside / (seconds - timed.calls * cost_in_all))
    return median(shares)


def timing_costs(clock: Clock) -> tuple[float, float]:
    """Seconds that timing adds to a call: to the time it is said to take, and in all."""
    empty = SimpleNamespace(call=lambda *arguments: None)
    timed = TimedKernels(empty, clock)
    count = 20_000
    seconds = []
    for kernels in (empty, timed):
        start = clock()
        for _ in range(count):
            kernels.call(1, 2, 3, 4, 5, 6, 7, 8)
        seconds.append((clock() - start) / count)
    return timed.seconds / count - seconds[0], seconds[1] - seconds[0]


class Pair:
    """The pair as it is used, and its measurements."""

    def __init__(self, target: Path, draft: Path, backend: NativeBackend) -> None:
        self.model, self.tokenizer = pilotfish.load(target, backend=backend)
        self._draft_model, draft_tokenizer = pilotfish.load(draft, backend=backend)
        self._pair = pilotfish.check_pair(draft_tokenizer, self.tokenizer)
        longest = max(ROW_COUNTS) + max(ROW_COUNTS[max(ROW_COUNTS)])
        if self.model.config.context_length < longest:
            raise OptionError(f"the target's context of {self.model.config.context_length} tokens is below {longest}")
        self.stopwatches = {length: Stopwatch(self.model, length) for length in ROW_COUNTS}
        self.draft_stopwatch = Stopwatch(self._draft_model, 64)
        self.prompts = [
            self.tokenizer.encode_chat([{"role": "user", "content": prompt["user"]}])
            for prompt in json.loads(PROMPTS.read_text("utf-8"))
            if prompt["class"] == "code"
        ]

    def decode_rate(self, proposal_length: int) -> float:
        """Tokens after the first per second of decoding, over all prompts."""
        drafter = DraftModelDrafter(self._draft_model, self._pair) if proposal_length else None
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        results = [
            pilotfish.generate(
                self.model,
                self.tokenizer,
                prompt,
                drafter=drafter,
                proposal_length=proposal_length,
                sampling=sampling,
            )
            for prompt in self.prompts
        ]
        num_tokens = sum(result.stats.num_tokens - 1 for result in results)
        return num_tokens / sum(result.stats.decode_seconds for result in results)

    def peer_decode_rate(self, peer: LlamaCppPeer) -> float:
        """The same for llama.cpp with the target alone."""
        eos = sorted(self.tokenizer.eos_token_ids)
        counts, seconds = zip(*(peer.call("generate", prompt, MAX_TOKENS, eos) for prompt in self.prompts), strict=True)
        return sum(counts) / sum(seconds)


def measure(target: Path, draft: Path, rounds: int) -> dict[str, Any]:
    backend = native_backend()
    for path in (target, draft):
        with path.open("rb") as file:
            while file.read(1 << 24):  # into the page cache
                pass
    note("loading in a fresh process")
    report: dict[str, Any] = {"backend": backend.name, "rounds": rounds}
    report |= in_fresh_process(load_and_generate, target, draft)
    note("profiling in a fresh process")
    report |= in_fresh_process(dispatch_shares, target, draft)
    note("preparing")
    pair = Pair(target, draft, backend)
    probe = machine_probe(backend)
    with ExitStack() as stack:
        peers: dict[str, LlamaCppPeer] = {}
        if importlib.util.find_spec("llama_cpp") is None:
            note("llama-cpp-python is not installed: nothing to compare with (see requirements-peers.txt)")
        else:
            peers = {mode: stack.enter_context(LlamaCppPeer(target, backend.threads, mode)) for mode in MODES}
        return report | measure_interleaved(pair, probe, peers, rounds)


def measure_interleaved(pair: Pair, probe: Probe, peers: dict[str, LlamaCppPeer], rounds: int) -> dict[str, Any]:
    turns = Turns()
    forwards: dict[tuple[int, int], WithLimits] = {}

    def own(measure: Callable[[], float]) -> Callable[[], float]:
        return partial(turns.take, pair, partial(pair.stopwatches[64].forward, 1), measure)

    def other(mode: str, method: str, *arguments: int) -> Callable[[], float]:
        call = peers[mode].call
        return partial(turns.take, mode, partial(call, "forward", 1, 64), partial(call, method, *arguments))

    measurements: dict[tuple[object, ...], Callable[[], float]] = {}
    for context_length, row_counts in ROW_COUNTS.items():
        for num_rows in row_counts:
            forward = WithLimits(partial(pair.stopwatches[context_length].forward, num_rows), probe)
            forwards[context_length, num_rows] = forward
            measurements["pilotfish", context_length, num_rows] = own(forward)
            for mode in peers:
                measurements[mode, context_length, num_rows] = other(mode, "forward", num_rows, context_length)
    measurements["pilotfish", "draft"] = own(pair.draft_stopwatch.draft_step)
    measurements["pilotfish", "prefill"] = own(partial(pair.stopwatches[64].prefill, PREFILL_TOKENS))
    for mode in peers:
        measurements[mode, "prefill"] = other(mode, "prefill", PREFILL_TOKENS)
    note("warming up")
    interleaved(measurements, 1)
    for forward in forwards.values():
        forward.limits.clear()
    note(f"measuring {len(measurements)} things in {rounds} rounds")
    samples = interleaved(measurements, rounds)
    seconds = medians(samples)

    generations: dict[str, Callable[[], float]] = {
        "speculative": own(partial(pair.decode_rate, PROPOSAL_LENGTH)),
        "target_only": own(partial(pair.decode_rate, 0)),
    }
    if peers:
        quicker = min(peers, key=lambda mode: seconds[mode, 64, 1])
        wake = partial(peers[quicker].call, "forward", 1, 64)
        generations["llamacpp"] = partial(turns.take, quicker, wake, partial(pair.peer_decode_rate, peers[quicker]))
    note("generating")
    rates = medians(interleaved(generations, min(rounds, GENERATION_ROUNDS)))
    limits = {key: forward.limits for key, forward in forwards.items()}
    return summarise(forward_work(pair.model), limits, samples, rates, list(peers))


def summarise(
    work: ForwardWork,
    limits: dict[tuple[int, int], list[MachineLimits]],
    samples: dict[tuple[object, ...], list[float]],
    rates: dict[str, float],
    modes: Sequence[str],
) -> dict[str, Any]:
    seconds = medians(samples)
    times = ForwardTimes(64, {num_rows: seconds["pilotfish", 64, num_rows] for num_rows in ROW_COUNTS[64]})
    bytes_per_second = median(limit.bytes_per_second for taken in limits.values() for limit in taken)
    peak = median(limit.macs_per_second for taken in limits.values() for limit in taken)
    own_rate = 64 * work.macs_per_row / times.seconds[64]

    def versus(*what: object) -> float | None:
        if not modes:
            return None
        return min(seconds[(mode, *what)] for mode in modes) / seconds[("pilotfish", *what)]

    def milliseconds(party: str) -> dict[int, dict[int, float]]:
        return {
            length: {rows: 1e3 * seconds[party, length, rows] for rows in ROW_COUNTS[length]} for length in ROW_COUNTS
        }

    return {
        "floor_ratio": {
            num_rows: floor_ratio(
                work,
                num_rows,
                samples["pilotfish", 64, num_rows],
                [replace(limit, macs_per_second=own_rate) for limit in limits[64, num_rows]],
            )
            for num_rows in ROW_COUNTS[64]
        },
        "t_ratio": times.ratios,
        "peak_share_64": own_rate / peak,
        "decode_vs_llamacpp": versus(64, 1),
        "verify5_vs_llamacpp": versus(64, 5),
        "prefill_vs_llamacpp": versus("prefill"),
        "speculative_vs_llamacpp": rates["speculative"] / rates["llamacpp"] if modes else None,
        "decode_tokens_per_second": rates,
        "t_ms": milliseconds("pilotfish"),
        "draft_step_ms": 1e3 * seconds["pilotfish", "draft"],
        "prefill_ms": 1e3 * seconds["pilotfish", "prefill"],
        "llamacpp_t_ms": {mode: milliseconds(mode) for mode in modes},
        "llamacpp_prefill_ms": {mode: 1e3 * seconds[mode, "prefill"] for mode in modes},
        "bandwidth_bytes_per_second": bytes_per_second,
        "integer_peak_macs_per_second": peak,
        "weight_bytes": work.num_bytes,
        "macs_per_row": work.macs_per_row,
    }


def measure_shape(name: str, rounds: int) -> dict[str, Any]:
    """Times of a pair with random weights, see `random_models`."""
    tokenizer = GGUFFile.open(find_model(catalog.default_pair()[1]))
    with TemporaryDirectory(prefix="pilotfish-") as folder:
        paths = [Path(folder) / f"{role}.gguf" for role in ("target", "draft")]
        for seed, (path, shape) in enumerate(zip(paths, random_models.PAIRS[name], strict=True)):
            note(f"writing the {path.stem} model")
            random_models.write_random_model(path, shape, tokenizer, seed)
        note("loading in a fresh process")
        loading = in_fresh_process(load_and_generate, *paths)
        found = run_roofline(*paths, rounds=rounds, progress=note)
    steps, draft_step = found.measurements.target_steps, found.measurements.draft_step
    seconds = {step.num_rows: step.seconds for step in steps}
    speedups = [allowed_speedup(acceptance, seconds, draft_step.seconds) for acceptance in SHAPE_ACCEPTANCES]
    return {
        "shape": name,
        "backend": found.backend,
        "rounds": rounds,
        **loading,
        "t_ms": {step.num_rows: 1e3 * step.seconds for step in steps},
        "t_ratio": {step.num_rows: step.seconds / seconds[1] for step in steps},
        "floor_ratio": {step.num_rows: 1 / step.floor_share for step in steps},
        "draft_step_ms": 1e3 * draft_step.seconds,
        "draft_step_floor_ratio": 1 / draft_step.floor_share,
        "allowed_speedup": {speedup.token_acceptance: speedup.speedup for speedup in speedups},
        "allowed_at_proposal_length": {speedup.token_acceptance: speedup.proposal_length for speedup in speedups},
        "bandwidth_bytes_per_second": found.measurements.bytes_per_second.median,
        "integer_peak_macs_per_second": found.measurements.macs_per_second.median,
        "weight_bytes": steps[0].num_bytes,
    }


def table(report: dict[str, Any]) -> str:
    """What a person wants to see first."""
    modes = list(report["llamacpp_t_ms"])
    lines = [f"{report['backend']}, medians of {report['rounds']} rounds, ms"]
    lines.append("".join(f"{title:>12}" for title in ("context", "rows", "T", "T/T(1)", "T/floor", *modes)))
    for context_length, times in report["t_ms"].items():
        for rows, took in times.items():
            short = context_length == 64
            cells = [str(context_length), str(rows), f"{took:.1f}"]
            cells += [f"{report[name][rows]:.2f}" if short else "" for name in ("t_ratio", "floor_ratio")]
            cells += [f"{report['llamacpp_t_ms'][mode][context_length][rows]:.1f}" for mode in modes]
            lines.append("".join(f"{cell:>12}" for cell in cells))
    nested = ("t_ms", "t_ratio", "floor_ratio", "llamacpp_t_ms", "backend", "rounds")
    return "\n".join([*lines, *(f"{name}: {show(value)}" for name, value in report.items() if name not in nested)])


def show(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(part)}" for key, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    default_target, default_draft = catalog.default_pair()
    parser = argparse.ArgumentParser(
        description="Measure what a step costs; the last line of stdout is one JSON object."
    )
    parser.add_argument("--model", help=f"target: a catalog name or a GGUF file ({default_target})")
    parser.add_argument("--draft-model", help=f"draft model: likewise ({default_draft})")
    parser.add_argument("--shape", choices=random_models.PAIRS, help="a pair with random weights in the shapes of this")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured (7)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.shape is not None and (options.model is not None or options.draft_model is not None):
        parser.error("--shape brings its own models")
    try:
        if options.shape is not None:
            report = measure_shape(options.shape, options.rounds)
        else:
            models = options.model or default_target, options.draft_model or default_draft
            report = measure(*map(find_model, models), options.rounds)
    except PilotfishError as error:
        note(f"error: {error}")
        sys.exit(2)
    if not options.json:
        print(table(report) if options.shape is None else "\n".join(f"{name}: {show(report[name])}" for name in report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
