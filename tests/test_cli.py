"""The command line: what it prints where, its exit status, and how it ends when something goes wrong.

Most tests call `main` in this process, with streams of their own; those that need real signals, pipes or a terminal
start one.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Outcome, Stream
from tiny_models import IM_START, tiny_config, tiny_metadata, torch_threads, write_tiny_model

import pilotfish
from pilotfish import catalog
from pilotfish.catalog import PullEvent
from pilotfish.cli.generate import as_json, summary
from pilotfish.cli.main import app
from pilotfish.cli.progress import PullProgress
from pilotfish.cli.terminal import AnswerWriter, Waiting, paint, printable
from pilotfish.errors import DiskFullError, FetchError, InvariantError, OptionError
from pilotfish.model import Transformer
from pilotfish.types import GenerationResult, GenerationStats, SamplingParams, TextEvent, TokenKind, TokenOutput

PROMPT = "the and the"
THINKING_TEMPLATE = "{{ messages[-1].content }}{% if not enable_thinking %} the end{% endif %}"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
pytestmark = pytest.mark.usefixtures("surroundings")
POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals, pipes and terminals")
REQUIRED_STATS = {
    "num_tokens", "num_prompt_tokens", "prefill_seconds", "decode_seconds", "end_to_end_seconds", "tokens_per_second",
    "num_steps", "num_draft_tokens", "num_accepted_tokens", "acceptance_rate", "mean_acceptance_length",
    "draft_prefill_seconds", "draft_seconds", "target_seconds", "verify_seconds", "cache_seconds",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@dataclass(frozen=True)
class Models:
    target: str
    draft: str
    other: str
    """A model with another vocabulary."""
    chatless: str
    thinking: str
    """A model whose chat template reads `enable_thinking`."""
    truncated: str


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    tokens = list(tiny_metadata(tiny_config())["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[5], tokens[6] = tokens[6], tokens[5]
    target = write_tiny_model(folder / "target.gguf")
    (folder / "truncated.gguf").write_bytes(target.read_bytes()[:-5000])
    return Models(
        str(target),
        str(write_tiny_model(folder / "draft.gguf", noise=0.1)),
        str(write_tiny_model(folder / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})),
        str(write_tiny_model(folder / "chatless.gguf", chat_template=None)),
        str(write_tiny_model(folder / "thinking.gguf", chat_template=THINKING_TEMPLATE)),
        str(folder / "truncated.gguf"),
    )


@pytest.fixture
def pair(models: Models) -> tuple[str, ...]:
    return ("--model", models.target, "--draft-model", models.draft)


def at_forward(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[torch.Tensor], object]) -> None:
    """Calls `action` with the logits of the forward `number` (from 0), counted over all models."""
    forward = Transformer.forward
    calls = iter(range(1_000_000))

    def wrapper(self: Transformer, *arguments: Any) -> torch.Tensor:
        logits = forward(self, *arguments)
        if next(calls) == number:
            action(logits)
        return logits

    monkeypatch.setattr(Transformer, "forward", wrapper)


def interrupt(_: object, **options: object) -> None:
    raise KeyboardInterrupt


@torch.inference_mode()
def spoil(logits: torch.Tensor) -> None:
    logits.fill_(torch.nan)


# The answer


def test_streams_the_answer_and_one_summary_line(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    outcome = cli("generate", *pair, "--max-tokens", "40", PROMPT)
    assert outcome.status == 0
    answer = cli("generate", *pair, "--max-tokens", "40", "--json", PROMPT).object
    assert outcome.out == answer["text"] + "\n"
    stats = answer["stats"]
    assert re.fullmatch(
        rf"40 tokens \(length\), \d+\.\d\d tokens/s, {stats['num_steps']} steps, acceptance \d+% "
        rf"\({stats['num_accepted_tokens']}/{stats['num_draft_tokens']}\), mean acceptance length "
        rf"{stats['mean_acceptance_length']:.2f}, draft \d+\.\d s, target \d+\.\d s\n",
        outcome.err,
    )


def test_json_is_one_object_with_all_statistics(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    outcome = cli("generate", *pair, "--max-tokens", "40", "--json", PROMPT)
    assert outcome.status == 0
    answer = outcome.object
    assert list(answer) == ["text", "token_ids", "finish_reason", "stats"]
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 40 == answer["stats"]["num_tokens"]
    assert set(answer["stats"]) >= REQUIRED_STATS | {field.name for field in fields(GenerationStats)}
    assert 0 < answer["stats"]["num_accepted_tokens"] < answer["stats"]["num_draft_tokens"]
    _, tokenizer = pilotfish.load(pair[1])
    assert tokenizer.decode(answer["token_ids"]).startswith(answer["text"].rstrip("\ufffd"))


@pytest.mark.parametrize("length", [0, 1, 2, 5, 16, 10**30])
def test_speculative_answer_equals_target_only(
    cli: Callable[..., Outcome], models: Models, pair: tuple[str, ...], length: int
) -> None:
    arguments = ("--max-tokens", "40", "--json", PROMPT)
    alone = cli("generate", "--model", models.target, *arguments).object
    both = cli("generate", *pair, "--proposal-length", str(length), *arguments).object
    assert both["text"] == alone["text"]
    assert both["token_ids"] == alone["token_ids"]
    assert alone["stats"]["num_draft_tokens"] == 0
    assert (both["stats"]["num_draft_tokens"] > 0) == (length > 0)


def test_threads_reach_both_models_and_change_no_answer(
    cli: Callable[..., Outcome], pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, honest = [], pilotfish.load

    def load(*arguments: Any, **options: Any) -> Any:
        loaded.append(options)
        return honest(*arguments, **options)

    monkeypatch.setattr(pilotfish, "load", load)
    answers = [
        cli("generate", *pair, *threads, "--max-tokens", "20", "--json", PROMPT).object["token_ids"]
        for threads in ((), ("--threads", "1"), ("--threads", "3"))
    ]
    assert loaded == [{"threads": None}] * 2 + [{"threads": 1}] * 2 + [{"threads": 3}] * 2
    assert answers[0] == answers[1] == answers[2]


def test_length_0_does_not_touch_the_draft_model(cli: Callable[..., Outcome], models: Models) -> None:
    for draft in ("/nowhere/draft.gguf", models.truncated, "smollm2-135m"):
        arguments = ("--model", models.target, "--draft-model", draft, "--max-tokens", "3", PROMPT)
        assert cli("generate", "--proposal-length", "0", *arguments).status == 0
        assert cli("generate", *arguments).error


def test_default_pair_runs_where_no_model_is_named(
    cli: Callable[..., Outcome], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = catalog.default_pair()
    files = {target: Path(models.target), draft: Path(models.draft)}
    pulled = []

    def pull(name: str, progress: object = None) -> Path:
        pulled.append(name)
        return files[name]

    monkeypatch.setattr(catalog, "pull", pull)
    assert cli("generate", "--max-tokens", "8", "--json", PROMPT).object["stats"]["num_draft_tokens"] > 0
    assert set(pulled) == {target, draft}
    pulled.clear()
    assert cli("generate", "--max-tokens", "8", "--proposal-length", "0", PROMPT).status == 0
    assert set(pulled) == {target}
    # A draft model alone goes with the default target; a target alone runs alone.
    pulled.clear()
    assert cli("generate", "--draft-model", models.draft, "--max-tokens", "3", PROMPT).status == 0
    assert set(pulled) == {target}
    assert "nothing drafted" in cli("generate", "--model", target, "--max-tokens", "3", PROMPT).err


def test_prompt_by_argument_stdin_and_file_is_the_same(
    cli: Callable[..., Outcome], models: Models, tmp_path: Path
) -> None:
    text = "the\tand  é\r\n the 😀 \n"
    (tmp_path / "prompt").write_bytes(text.encode())
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + text.encode())
    common = ("generate", "--model", models.target, "--max-tokens", "5", "--json")
    for raw in ([], ["--raw"]):
        outcomes = [
            cli(*common, *raw, text),
            cli(*common, *raw, "-", stdin=text.encode()),
            cli(*common, *raw, "--file", str(tmp_path / "prompt")),
            cli(*common, *raw, "--file", str(tmp_path / "bom")),
        ]
        answers = [(outcome.object["token_ids"], outcome.object["stats"]["num_prompt_tokens"]) for outcome in outcomes]
        assert answers == answers[:1] * 4


def test_prompts_that_look_like_something_else(cli: Callable[..., Outcome], models: Models) -> None:
    common = ("generate", "--model", models.target, "--max-tokens", "2", "--raw", "--json")
    assert "-x" in cli(*common, "-x").error
    assert cli(*common, "--", "-x").object["stats"]["num_prompt_tokens"] == 2
    assert cli(*common, "-", stdin=b"a\0b").object["stats"]["num_prompt_tokens"] == 3
    assert cli(*common, "  ").status == 0  # nothing to answer, but something to continue


def test_template_raw_and_system(cli: Callable[..., Outcome], models: Models) -> None:
    _, tokenizer = pilotfish.load(models.target)

    def prompt_tokens(*arguments: str) -> int:
        outcome = cli("generate", "--model", models.target, "--max-tokens", "1", "--json", *arguments)
        return outcome.object["stats"]["num_prompt_tokens"]

    user = {"role": "user", "content": PROMPT}
    assert prompt_tokens(PROMPT) == len(tokenizer.encode_chat([user]))
    assert prompt_tokens("--raw", PROMPT) == len(tokenizer.encode(PROMPT))
    system = {"role": "system", "content": "in the end"}
    assert prompt_tokens("--system", "in the end", PROMPT) == len(tokenizer.encode_chat([system, user]))
    assert prompt_tokens("--raw", IM_START) == 1


def test_enable_thinking_reaches_the_template(cli: Callable[..., Outcome], models: Models) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        return cli("generate", "--max-tokens", "4", "--json", *arguments).object

    thinking, pair = ("--model", models.thinking), ("--model", models.thinking, "--draft-model", models.draft)
    prompts = {True: PROMPT, False: PROMPT + " the end"}
    for enable_thinking, prompt in prompts.items():
        flag = ["--enable-thinking"] if enable_thinking else []
        expected = run(*thinking, "--raw", prompt)
        assert run(*thinking, *flag, PROMPT)["token_ids"] == expected["token_ids"]
        assert run(*pair, *flag, PROMPT)["token_ids"] == expected["token_ids"]
        model, tokenizer = pilotfish.load(models.thinking)
        messages = [{"role": "user", "content": PROMPT}]
        sampling = SamplingParams(max_tokens=4)
        result = pilotfish.generate(model, tokenizer, messages, sampling=sampling, enable_thinking=enable_thinking)
        assert list(result.token_ids) == expected["token_ids"]
        assert result.stats.num_prompt_tokens == expected["stats"]["num_prompt_tokens"]
    assert (
        run(*thinking, PROMPT)["stats"]["num_prompt_tokens"]
        > run(*thinking, "--raw", PROMPT)["stats"]["num_prompt_tokens"]
    )


def test_enable_thinking_that_cannot_be_honoured_is_an_error(cli: Callable[..., Outcome], models: Models) -> None:
    assert "no thinking switch" in cli("generate", "--model", models.target, "--enable-thinking", PROMPT).error
    model, tokenizer = pilotfish.load(models.thinking)
    for prompt in (PROMPT, tokenizer.encode(PROMPT), ""):
        with pytest.raises(OptionError, match="enable_thinking needs a prompt of chat messages"):
            pilotfish.generate(model, tokenizer, prompt, enable_thinking=True)


def test_ends_of_an_answer(cli: Callable[..., Outcome], models: Models) -> None:
    common = ("generate", "--model", models.target, "--raw")
    nothing = cli(*common, "--max-tokens", "0", PROMPT)
    assert (nothing.status, nothing.out) == (0, "\n")
    assert "0 tokens (length)" in nothing.err
    full = cli(*common, "--context-length", "9", "--json", PROMPT).object
    assert full["stats"]["num_tokens"] + full["stats"]["num_prompt_tokens"] == 9
    assert full["finish_reason"] == "length"


def test_summary_of_nothing() -> None:
    assert summary(GenerationResult("", (), "abort", GenerationStats())) == (
        "0 tokens (abort), 0.00 tokens/s, 0 steps, nothing drafted, mean acceptance length 0.00, draft 0.0 s, "
        "target 0.0 s"
    )


# Text to a pipe, to a terminal, in colours


def test_show_drafts_into_a_pipe_is_the_plain_text(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    arguments = ("generate", *pair, "--max-tokens", "60", PROMPT)
    plain, shown = cli(*arguments), cli(*arguments, "--show", "drafts")
    assert shown.out == plain.out
    assert shown.err.startswith("pilotfish: --show drafts: stdout shows no colours")
    assert "\x1b" not in shown.err


def test_each_kind_has_its_colour_on_a_terminal(
    cli: Callable[..., Outcome], pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", *pair, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    shown = cli(*arguments, "--show", "drafts", terminal="out")
    assert ANSI.sub("", shown.out) == printable(text)
    assert {"\x1b[32m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"} == set(ANSI.findall(shown.out))
    assert shown.err.startswith("tokens: accepted recovered bonus plain\n")
    coloured = cli(*arguments, "--show", "drafts", terminal="out err").err
    assert "\x1b[32maccepted\x1b[0m \x1b[1;31mrecovered\x1b[0m \x1b[36mbonus\x1b[0m plain\n" in coloured
    # Without --show no colours, and the terminal is not obeyed either.
    assert cli(*arguments, terminal="out").out == printable(text)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli(*arguments, "--show", "drafts").out == shown.out
    assert cli(*arguments).out == text
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli(*arguments, "--show", "drafts", terminal="out").out == printable(text)


def test_text_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["[bold]a[/bold] [/x]", " :smile: ", "\t x  \n\n", "é😀世界" * 60, "word " * 60 + "\n", "  ", "", "\ufffd"]
    kinds: list[TokenKind] = ["accepted", "recovered", "bonus", "plain"]
    tokens = tuple(TokenOutput(i, text, kinds[i % 4]) for i, text in enumerate(texts))
    for terminal in (False, True):
        out = Stream(terminal)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", Stream(terminal))
        writer = AnswerWriter(show_drafts=True)
        writer.write(TextEvent(tokens))
        writer.finish()
        assert ("\x1b[36m\t x  \n\n\x1b[0m" in out.text()) == terminal
        assert ANSI.sub("", out.text()) == "".join(texts) + "\n"


def test_a_terminal_is_shown_control_characters_and_a_pipe_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\x00\b\r\x7f\x9b2J\u200b end\n\t"
    event = TextEvent((TokenOutput(1, hostile, "plain"),))
    for terminal, expected in (
        (False, hostile),
        (True, "\\x1b]0;title\\x07\\x1b[2J\\x00\\x08\\x0d\\x7f\\x9b2J\u200b end\n\t"),
    ):
        monkeypatch.setattr(sys, "stdout", out := Stream(terminal))
        AnswerWriter(show_drafts=False).write(event)
        assert out.text() == expected


def test_paint_colours_text_only() -> None:
    assert paint("", "accepted") == ""
    assert paint("a", "plain") == "a"
    assert paint("a", "bonus") == "\x1b[36ma\x1b[0m"


def test_other_encodings_end_no_answer(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    arguments = ("generate", *pair, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    assert not text.isascii()
    assert cli(*arguments, encoding="ascii").out == text.encode("ascii", "replace").decode()
    # An object keeps every character, in any encoding.
    for encoding in ("utf-8", "ascii", "latin-1"):
        outcome = cli(*arguments, "--json", encoding=encoding)
        assert outcome.object["text"] + "\n" == text
    assert "\ufffd" in cli(*arguments, "--json").out


def test_an_object_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\x1b[2J\x7f\x9b2J é😀\u200b"
    monkeypatch.setattr(sys, "stdout", Stream())
    line = as_json(GenerationResult(text, (), "stop", GenerationStats()))
    assert json.loads(line)["text"] == text
    assert printable(line) == line
    assert "é😀" in line


# The spinner and the bar


def test_spinner_is_on_a_terminal_only(
    cli: Callable[..., Outcome], models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / "[bold]a[/x] :smile:.gguf"
    odd.parent.mkdir()
    odd.symlink_to(models.target)
    arguments = ("generate", "--model", str(odd), "--max-tokens", "20", PROMPT)
    quiet = cli(*arguments)
    shown = cli(*arguments, terminal="err")
    assert shown.out == quiet.out
    assert "reading the prompt" in shown.err
    assert "\x1b" not in quiet.err
    assert quiet.err.count("\n") == 1
    assert shown.err.count("\x1b[?25l") == shown.err.count("\x1b[?25h") > 0  # the cursor is back
    assert shown.err.endswith(" s\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in cli(*arguments).err


def test_spinner_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Stream(terminal=True))
    with Waiting() as waiting:
        waiting.show("loading [bold]a[/x] :smile: \x1b[2J")
    assert "loading [bold]a[/x] :smile: \\x1b[2J" in err.text()


def test_progress_is_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        monkeypatch.setenv("FORCE_COLOR", "" if terminal else "1")
        monkeypatch.setattr(sys, "stderr", err := Stream(terminal))
        with PullProgress("toy"):
            pass
        assert err.text() == ""  # nothing had to be fetched
        with PullProgress("toy") as progress:
            progress(PullEvent(0, 0, "asking"))
            progress(PullEvent(500, 1000, "[bold]part[/bold] :smile:"))
        assert ("toy: [bold]part[/bold] :smile:" in err.text()) == terminal
        assert terminal or err.text() == ""


# Errors: one line on stderr, status 2, nothing on stdout


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        ((), "give one prompt"),
        (("a", "--file", "b"), "give one prompt"),
        (("a", "b"), "unexpected extra argument"),
        (("",), "the prompt is empty"),
        (("", "--raw"), "the prompt is empty"),
        (("  \n",), "the prompt is empty"),
        (("-",), "the prompt is empty"),
        (("--colour", "x"), "No such option"),
        (("--max-tokens", "-1", "x"), "'--max-tokens': -1 is not in the range"),
        (("--max-tokens", "many", "x"), "'many' is not a valid whole number"),
        (("--max-tokens",), "requires an argument"),
        (("--proposal-length", "-1", "x"), "'--proposal-length': -1 is not in the range"),
        (("--proposal-length", "1.5", "x"), "'1.5' is not a valid whole number"),
        (("--proposal-length", "True", "x"), "'True' is not a valid whole number"),
        (("--proposal-length", "4", "--model", "m", "x"), "--proposal-length 4 needs a draft model"),
        (("--context-length", "0", "x"), "'--context-length': 0 is not in the range"),
        (("--threads", "0", "x"), "'--threads': 0 is not in the range"),
        (("--threads", "1025", "x"), "'--threads': 1025 is not in the range"),
        (("--temperature", "101", "x"), "temperature must be a number from 0 to 100, got 101"),
        (("--temperature", "nan", "x"), "temperature must be a number from 0 to 100, got nan"),
        (("--temperature", "warm", "x"), "'warm' is not a valid float"),
        (("--show", "tokens", "x"), "'tokens' is not"),
        (("--show", "drafts", "--json", "x"), "cannot be combined"),
        (("--raw", "--system", "s", "x"), "cannot be combined"),
        (("--raw", "--enable-thinking", "x"), "--raw and --enable-thinking cannot be combined"),
        (("--model", "", "x"), "--model is empty"),
        (("--draft-model", "", "x"), "--draft-model is empty"),
        (
            ("--model", "gpt", "x"),
            "no such model: gpt is no file or folder, no name in the catalog (qwen2.5-coder-1.5b",
        ),
        (("--model", "/", "x"), "the folder / holds neither a GGUF file nor config.json"),
        (("--model", "qwen3-4b:Q8_0", "x"), "it has qwen3-4b, qwen3-4b:mlx-4bit, qwen3-4b:bf16"),
        (("\udcff",), "the prompt is not UTF-8 text"),
        (("--system", "a\udcff", "x"), "--system is not UTF-8 text"),
        (("--file", "/nowhere"), "cannot read /nowhere: No such file or directory"),
        (("--file", "."), "cannot read .: Is a directory"),
    ],
)
def test_a_wrong_option_or_prompt(cli: Callable[..., Outcome], arguments: tuple[str, ...], telling: str) -> None:
    assert telling in cli("generate", *arguments).error


def test_options_are_checked_before_anything_is_fetched_or_loaded(
    cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("fetched or loaded before the options were checked")

    monkeypatch.setattr(catalog, "pull", never)
    monkeypatch.setattr(pilotfish, "load", never)
    assert "temperature" in cli("generate", "--temperature", "-1", "x").error
    assert "empty" in cli("generate", "").error


def test_a_wrong_prompt_file_or_stdin(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("ab\xe9".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf\n")
    assert "latin is not UTF-8 text (byte 2); save it as UTF-8" in cli("generate", "--file", f"{tmp_path}/latin").error
    assert "the prompt is empty" in cli("generate", "--file", f"{tmp_path}/empty").error
    assert "the prompt is empty" in cli("generate", "--file", f"{tmp_path}/bom").error
    assert "stdin is not UTF-8 text (byte 0)" in cli("generate", "-", stdin=b"\xff\xfea").error


def test_a_wrong_model(cli: Callable[..., Outcome], models: Models, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return cli("generate", *arguments, PROMPT).error

    (tmp_path / "text.gguf").write_text("not a model at all, but longer than a header")
    (tmp_path / "empty.gguf").touch()
    assert "truncated.gguf" in error("--model", models.truncated)
    assert "truncated.gguf" in error("--model", models.target, "--draft-model", models.truncated)
    assert "text.gguf" in error("--model", f"{tmp_path}/text.gguf")
    assert "empty.gguf" in error("--model", f"{tmp_path}/empty.gguf")
    assert "add --raw" in error("--model", models.chatless)
    assert cli("generate", "--model", models.chatless, "--raw", "--max-tokens", "2", PROMPT).status == 0
    assert "token" in error("--model", models.target, "--draft-model", models.other)
    assert "from 1 to the model's own 512" in error("--model", models.target, "--context-length", "513")


def test_a_prompt_beyond_the_context(cli: Callable[..., Outcome], models: Models) -> None:
    common = ("generate", "--model", models.target)
    assert "the prompt has" in cli(*common, "--context-length", "4", PROMPT).error
    assert "leaves no room in the context of 512" in cli(*common, "-", stdin=b"the and " * 40_000).error


def test_a_fetch_that_fails(cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """`catalog` has tests of its own for when it raises these."""
    assert "cannot fetch smollm2-135m" in cli("pull", "smollm2-135m").error
    assert "cannot fetch smollm2-135m" in cli("generate", "--model", "smollm2-135m", "x").error
    assert "no model 'gpt' in the catalog; it has qwen2.5-coder-1.5b" in cli("pull", "gpt").error
    for failure in (FetchError("no network"), DiskFullError("two\nlines"), InvariantError("\x1b[2J")):

        def pull(name: str, progress: object = None, failure: Exception = failure) -> Path:
            raise failure

        monkeypatch.setattr(catalog, "pull", pull)
        line = "pilotfish: error: " + printable(str(failure).replace("\n", " ")) + "\n"
        assert cli("pull", "smollm2-135m").error == line
        assert cli("generate", "x").error == line


@pytest.mark.parametrize("number", [0, 1, 6, 9])
def test_nan_in_the_middle_keeps_what_was_said(
    cli: Callable[..., Outcome], models: Models, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    arguments = ("generate", "--model", models.target, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    with monkeypatch.context() as patch:
        at_forward(patch, number, spoil)
        outcome = cli(*arguments)
    assert outcome.status == 2
    assert outcome.error_line
    said = outcome.out.removesuffix("\n")
    assert text.startswith(said)
    assert (outcome.out == "") == (number == 0)  # nothing said, nothing printed
    at_forward(monkeypatch, number, spoil)
    outcome = cli(*arguments, "--json")
    assert outcome.status == 2
    assert outcome.error_line
    if number == 0:
        assert outcome.out == ""
    else:
        assert outcome.object["finish_reason"] == "abort"
        assert outcome.object["text"] == said
        assert len(outcome.object["token_ids"]) == number


# Ctrl-C


@pytest.mark.parametrize("number", [0, 1, 7])
def test_ctrl_c_keeps_what_was_said(
    cli: Callable[..., Outcome], pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    arguments = ("generate", *pair, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    with monkeypatch.context() as patch:
        at_forward(patch, number, interrupt)
        outcome = cli(*arguments, terminal="err")
    assert outcome.status == 130
    said = outcome.out.removesuffix("\n")
    assert text.startswith(said)
    assert (outcome.out == "") == (number == 0)
    assert ANSI.sub("", outcome.err).splitlines()[-1].split(", ")[0].endswith(" tokens (abort)")
    assert outcome.err.count("\x1b[?25l") == outcome.err.count("\x1b[?25h")
    at_forward(monkeypatch, number, interrupt)
    outcome = cli(*arguments, "--json")
    assert outcome.status == 130
    assert outcome.object["finish_reason"] == "abort"
    assert outcome.object["text"] == said
    assert outcome.object["stats"]["num_tokens"] == len(outcome.object["token_ids"])


def test_ctrl_c_while_fetching_or_loading(
    cli: Callable[..., Outcome], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilotfish, "load", interrupt)
    monkeypatch.setattr(catalog, "pull", lambda *_: interrupt(None))
    for arguments in (("generate", "x"), ("generate", "--model", models.target, "x"), ("pull", "smollm2-135m")):
        assert cli(*arguments) == Outcome(130, "", "pilotfish: interrupted\n")
    outcome = cli("generate", "--json", "x")
    assert outcome.status == 130
    assert (outcome.object["text"], outcome.object["finish_reason"]) == ("", "abort")
    assert set(outcome.object["stats"]) >= REQUIRED_STATS


# Starts as a shell starts it in the foreground, and at forward number `WAIT_AT` tells stderr, and waits.
CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background starts with it ignored
from pilotfish.cli.main import main
wait_at = int(os.environ.get("WAIT_AT", -1))
if wait_at >= 0:
    from pilotfish.model import Transformer
    forward, calls = Transformer.forward, iter(range(1000000))
    def waiting_forward(self, *arguments):
        if next(calls) == wait_at:
            os.write(2, b"waiting\\n")
            time.sleep(600)
        return forward(self, *arguments)
    Transformer.forward = waiting_forward
main()
"""


def child(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], **options)


@POSIX
def test_a_real_ctrl_c(cli: Callable[..., Outcome], models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", "--model", models.target, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    monkeypatch.setenv("WAIT_AT", "9")
    with child(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"waiting\n"
        # What was decided is out before the rest is.
        assert select.select([process.stdout], [], [], 60)[0] or process.kill()
        streamed = os.read(process.stdout.fileno(), 1000)
        assert len(streamed) > 5
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b"\n"
    assert text.encode().startswith(streamed)
    assert re.fullmatch(rb"9 tokens \(abort\).*\n", err)


# Pipes, full disks, terminals


@POSIX
def test_a_closed_pipe_ends_quietly(models: Models) -> None:
    for arguments in (("generate", "--model", models.target, "--max-tokens", "300", PROMPT), ("generate", "--help")):
        process = child(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        if arguments[-1] == PROMPT:
            process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
        process.stderr.close()


@POSIX
def test_tables_for_a_reader_that_has_left_end_quietly(surroundings: None) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone, child("models", stdout=gone, stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(models: Models) -> None:
    for options in ((), ("--json",)):
        arguments = ("generate", "--model", models.target, "--max-tokens", "3", *options, PROMPT)
        with Path("/dev/full").open("wb") as full, child(*arguments, stdout=full, stderr=subprocess.PIPE) as process:
            _, err = process.communicate(timeout=60)
        assert err == b"pilotfish: error: cannot write the output: No space left on device\n"
        assert process.returncode == 2


@POSIX
def test_on_a_real_terminal(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    import pty

    arguments = ("generate", *pair, "--max-tokens", "60", PROMPT)
    text = cli(*arguments).out
    ours, theirs = pty.openpty()
    process = child(*arguments, "--show", "drafts", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux says that the other side is closed
            piece = b""
        if not piece:
            break
        screen += piece
    os.close(ours)
    assert process.wait(60) == 0
    shown = screen.decode().replace("\r\n", "\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0
    assert "\x1b[32maccepted\x1b[0m" in shown
    assert ANSI.sub("", shown[shown.rindex("\x1b[?25h") :]).lstrip("\r").startswith(printable(text) + "60 tokens")


# The other commands


def test_models_lists_every_model(cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "locate", lambda entry: Path("x") if entry.name == "smollm2-135m" else None)
    outcome = cli("models")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert len(lines) == 1 + len(catalog.entries())
    for line, entry in zip(lines[1:], catalog.entries().values(), strict=True):
        name, size, licence, present = line.replace(" MB", "").split()[:4]
        assert (name, licence) == (entry.name, entry.licence)
        assert size == ("-" if entry.size is None else f"{entry.size / 1e6:,.0f}")
        assert present == ("yes" if name == "smollm2-135m" else "no")
    assert "(default target)" in lines[1]
    assert "(default draft)" in lines[2]
    for width in (64, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = ANSI.sub("", cli("models", terminal="out").out)
        assert all(len(line) <= width for line in shown.splitlines())
        assert {line.split()[0] for line in shown.splitlines() if line[0] != " "} == {"name", *catalog.entries()}


def test_pull_prints_the_path(cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "pull", lambda name, progress: Path("/models") / f"{name}.gguf")
    assert cli("pull", "smollm2-135m") == Outcome(0, f"{Path('/models/smollm2-135m.gguf')}\n", "")


def test_help_and_version(cli: Callable[..., Outcome]) -> None:
    bare = cli()
    assert bare == cli("--help") == cli("-h")
    assert bare.status == 0
    assert cli("--version") == Outcome(0, f"pilotfish {pilotfish.__version__}\n", "")
    for name, command in app.commands.items():
        outcome = cli(name, "--help")
        assert outcome.status == 0
        assert outcome.err == ""
        assert f"  {name}" in bare.out
        for parameter in command.params:
            assert parameter.opts[0] in outcome.out or parameter.param_type_name == "argument"
    assert "..." not in bare.out.split("Commands:")[1]
    assert "(see pilotfish --help)" in cli("swim").error
    assert "(see pilotfish pull --help)" in cli("pull").error
