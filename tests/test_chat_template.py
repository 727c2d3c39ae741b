"""Chat templates: what they may use, what they are told, and what those cannot do that mean harm."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import BOS, byte_id, tiny_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pilotfish.errors import ChatTemplateError, PromptError
from pilotfish.tokenizer import Tokenizer, template_process, template_worker
from pilotfish.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hé"}]
QWEN3 = (Path(__file__).parent / "data" / "qwen3_chat_template.jinja").read_text("utf-8")
"""Qwen3's template as published, but for its words about tools."""
POSIX = pytest.mark.skipif(os.name == "nt", reason="only POSIX systems limit a process's memory and processor time")


@pytest.mark.real_model
def test_real_chat_templates(qwen: Tokenizer, smollm: Tokenizer) -> None:
    assert qwen.has_chat_template
    assert qwen.render_chat([{"role": "system", "content": "Be brief."}, *MESSAGES]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.render_chat(MESSAGES, add_generation_prompt=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHé<|im_end|>\n"
    )
    assert qwen.encode_chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == (
        [151644, 8948, 198, 64, 151645, 198, 151644, 872, 198, 65, 151645, 198, 151644, 77091, 198]
    )


def render(template: str, messages: list[dict[str, str]] = MESSAGES, **options: Any) -> str:
    return tiny_tokenizer(chat_template=template).render_chat(messages, **options)


def test_what_a_template_can_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hé<|im_end|>"
    assert render("{% if add_generation_prompt %}yes{% endif %}{% if tools %}no{% endif %}") == "yes"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert render("{% for m in messages %}{% break %}{% endfor %}") == ""
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_strftime_now_reads_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", bos_token="", eos_token="", now=lambda: datetime(2024, 7, 26)
    )
    assert template.render(MESSAGES) == "26 Jul 2024"


def test_encode_chat_does_not_add_bos_twice() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}a", **{"ggml.add_bos_token": True})
    assert tokenizer.encode_chat(MESSAGES) == [BOS, byte_id(0x61)]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no\nsystem role') }}", "no system role"),
        ("{{ messages[0].tool_calls.x }}", "UndefinedError"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].update(role='x') }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(1000000) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ x | nofilter }}", "nofilter"),
    ],
)
def test_a_failing_template_is_one_line(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_a_missing_template() -> None:
    tokenizer = tiny_tokenizer()
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        tokenizer.render_chat(MESSAGES)


def test_a_broken_template_does_not_keep_a_model_from_loading() -> None:
    assert tiny_tokenizer(chat_template="{% if %}").encode("a") == [byte_id(0x61)]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        (["hello"], "message 0 must be a mapping"),
        ([*MESSAGES, {"role": "user"}], "message 1 must have a content of type str, not None"),
        ([{"content": "x"}], "message 0 must have a role of type str"),
        ([{"role": 1, "content": "x"}], "message 0 must have a role of type str, not 1"),
        ([{"role": "user", "content": ["x"]}], "message 0 must have a content of type str"),
    ],
)
def test_malformed_messages(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render("x", messages)


# Against transformers

roles = st.sampled_from(["system", "user", "assistant"])
contents = st.text(max_size=20) | st.sampled_from(
    ["<think>\na\n</think>\n\nb", "\n", "<tool_response>x</tool_response>"]
)
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), min_size=1, max_size=5)
QWEN3_TEMPLATE = ChatTemplate(QWEN3, bos_token="", eos_token="<|im_end|>")


def check_against_transformers(template: ChatTemplate, source: str, messages: Any, **options: bool) -> None:
    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    assert template.render(messages, **options) == rendered[0]


@given(messages=conversations, enable_thinking=st.booleans(), add_generation_prompt=st.booleans())
def test_prompts_are_those_of_transformers(messages: Any, enable_thinking: bool, add_generation_prompt: bool) -> None:
    check_against_transformers(
        QWEN3_TEMPLATE,
        QWEN3,
        messages,
        enable_thinking=enable_thinking,
        add_generation_prompt=add_generation_prompt,
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none %}tools{% endif %}{% if documents is defined %}defined{% endif %}",
        "{{ messages | tojson(ensure_ascii=true, indent=1, separators=(',', ':'), sort_keys=true) }}",
        "{{ messages | tojson(true) }}",
        "{% for m in messages %}a\n{% generation %}\n{{ m.content }}\n{% endgeneration %}\nb{% endfor %}",
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}",
    ],
)
def test_what_templates_may_use_means_what_it_means_in_transformers(source: str) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    check_against_transformers(template, source, [{"role": "user", "content": "<é>"}], add_generation_prompt=True)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_prompts_of_real_templates_are_those_of_transformers(
    name: str, real_metadata: Callable[[str], dict[str, Any]]
) -> None:
    source = real_metadata(name)["tokenizer.chat_template"]
    template = ChatTemplate(source, bos_token="", eos_token="")
    for messages in (MESSAGES, [{"role": "system", "content": "a\n"}, *MESSAGES, {"role": "assistant", "content": ""}]):
        check_against_transformers(template, source, messages, add_generation_prompt=True)


@given(content=st.text(max_size=40))
def test_a_template_gets_and_gives_any_text_as_it_is(content: str) -> None:
    assert ECHO.render([{"role": "user", "content": content}]) == content


ECHO = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")


def test_text_that_is_not_unicode_is_the_tokenizers_to_refuse() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content }}")
    for content in ("\ud83d\ude00", "a\udfff"):
        assert tokenizer.render_chat([{"role": "user", "content": content}]) == content
        with pytest.raises(PromptError, match="lone surrogate"):
            tokenizer.encode_chat([{"role": "user", "content": content}])


def test_what_json_does_not_have_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="the messages hold something"):
        ECHO.render([{"role": "user", "content": "a", "tools": object()}])  # type: ignore[dict-item]


# Thinking


def test_thinking_is_off_unless_asked_for() -> None:
    prompt = "<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n"
    assert render(QWEN3) == prompt + "<think>\n\n</think>\n\n"
    assert render(QWEN3, enable_thinking=True) == prompt
    tokenizer = tiny_tokenizer(chat_template=QWEN3)
    assert tokenizer.encode_chat(MESSAGES, enable_thinking=True) == tokenizer.encode(prompt)
    assert render("{{ enable_thinking }}") == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ enable_thinking }}",
        "{% if x %}{{ enable_thinking }}{% endif %}",
        "{% set enable_thinking = enable_thinking | default(true) %}",
        "{% macro f() %}{{ enable_thinking }}{% endmacro %}",
    ],
)
def test_a_template_that_looks_at_the_switch_takes_it(template: str) -> None:
    render(template, enable_thinking=True)


@pytest.mark.parametrize(
    "template",
    ["x", "{{ 'enable_thinking' }}", "{# enable_thinking #}", "{% set enable_thinking = 1 %}{{ enable_thinking }}"],
)
def test_a_template_without_the_switch_refuses_it(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="has no thinking switch"):
        render(template, enable_thinking=True)
    render(template)


# Templates that mean harm


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "messages.__class__.__base__.__subclasses__()",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "lipsum.__globals__['os']",
        "cycler.__init__.__globals__",
        "joiner.__init__.__globals__",
        "namespace.__init__.__globals__",
        "''['__class__']",
        "(''|attr('__class__'))",
        "'{0.__class__}'.format(1)",
        "('%s' % ''.__class__)",
        "messages|map(attribute='__class__')|list|first",
        "self.__init__.__globals__",
        "self._TemplateReference__context",
        "cycler('a').__class__.__mro__",
    ],
)
def test_attributes_that_lead_out_of_the_sandbox_are_nothing(expression: str) -> None:
    try:
        found = render("{{ " + expression + " }}")
    except ChatTemplateError as error:
        assert "SecurityError" in str(error) or "UndefinedError" in str(error)  # noqa: PT017
    else:
        assert found == ""


TOO_LONG = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{{ lipsum(n=10**8) }}",
]
TOO_MUCH = [
    "{{ 'a' * 10**10 }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'a'.center(10**9) }}",
    "{{ '{:>1000000000}'.format('a') }}",
    "{{ (range(99999) | list) * 99999 }}",
    "{{ 'a' | indent(10**9) }}",
    "{% for i in range(99999) %}{{ 'a' * 20000 }}{% endfor %}",
]
TOO_DEEP = [
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 99999 + "1 }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
]


@POSIX
@pytest.mark.parametrize("template", TOO_LONG)
def test_a_template_that_loops_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0)
    with pytest.raises(ChatTemplateError, match="more than 0 s of processor time"):
        render(template)


def test_a_template_that_loops_is_ended_by_the_clock_where_nothing_else_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_process, "MAX_WALL_SECONDS", 0.3)
    with pytest.raises(ChatTemplateError, match="was killed"):
        render(TOO_LONG[0])


@POSIX
@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_that_fills_the_memory_is_ended(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="memory"):
        render(template)


@pytest.mark.parametrize("template", TOO_DEEP)
def test_a_template_that_recurses_is_ended(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        render(template)


def test_an_answer_is_bounded() -> None:
    limit = template_process.MAX_ANSWER_BYTES
    assert len(render(f"{{{{ 'a' * {limit - 100} }}}}")) == limit - 100
    for template in (f"{{{{ 'a' * {limit} }}}}", f"{{{{ '\\n' * {limit // 2} }}}}", f"{{{{ 'é' * {limit // 2} }}}}"):
        with pytest.raises(ChatTemplateError, match="writes more than 16 MB"):
            render(template)


@POSIX
def test_after_a_template_was_ended_the_next_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0)
    template = ChatTemplate(
        "{% if messages[0].content == 'loop' %}" + TOO_LONG[0] + "{% endif %}{{ messages[0].content }}",
        bos_token="",
        eos_token="",
    )
    for _ in range(2):
        assert template.render(MESSAGES) == "Hé"
        with pytest.raises(ChatTemplateError, match="processor time"):
            template.render([{"role": "user", "content": "loop"}])


@POSIX
def test_each_prompt_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    template = ChatTemplate(
        "{% for i in range(300) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x", bos_token="", eos_token=""
    )
    assert [template.render(MESSAGES) for _ in range(30)] == ["x"] * 30


# The process that renders


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "its process ended with status 3"),
        ("import sys; print('hello', flush=True); sys.stdin.read()", "answers nonsense"),
        ("import sys; print(5, flush=True); sys.stdin.read()", "answers nonsense"),
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
    ],
)
def test_a_process_that_breaks_is_one_line_and_gone(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(program)
    template = ChatTemplate("x", bos_token="", eos_token="")
    with monkeypatch.context() as patch:
        patch.setattr(template_worker, "__file__", str(tmp_path / "worker.py"))
        with pytest.raises(ChatTemplateError, match=message) as caught:
            template.render(MESSAGES)
        assert "\n" not in str(caught.value)
    assert template.render(MESSAGES) == "x"


def test_no_python_to_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/nowhere/python", "", None):
        monkeypatch.setattr(sys, "executable", path)
        with pytest.raises(ChatTemplateError, match="cannot start Python"):
            render("x")


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
    assert template.render([{"role": "user", "content": "first"}]) == "first"
    send = template_process._send

    def interrupted(*arguments: Any) -> None:
        send(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "second"}])
    assert template.render([{"role": "user", "content": "third"}]) == "third"


def test_threads_get_their_own_answers() -> None:
    names = [str(number) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: ECHO.render([{"role": "user", "content": name}]), names)) == names


def test_the_worker_needs_nothing_but_the_standard_library_and_jinja2() -> None:
    tree = ast.parse(Path(template_worker.__file__).read_text("utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= {*sys.stdlib_module_names, "jinja2"}


PROGRAM = """
import gc, os, resource, signal, sys, time
from pilotfish.errors import ChatTemplateError
from pilotfish.tokenizer.chat_template import ChatTemplate
def template(source):
    return ChatTemplate(source, bos_token="", eos_token="")
def render(template):
    return template.render([{"role": "user", "content": "x"}])
def children():
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
"""


def run_program(code: str, redirect: str = "") -> None:
    """Runs `code` in a process and session of its own; it must say nothing, not even of a leaked pipe."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -X dev -W error -c "$1" {redirect}', sys.executable, PROGRAM + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout.decode()) == (0, "")


@POSIX
def test_the_process_ends_with_the_template() -> None:
    run_program(
        "first = template('a'); assert not children(); assert render(first) == 'a'; assert children()\n"
        "del first; gc.collect(); assert not children()"
    )


@POSIX
def test_nothing_is_left_at_the_end_of_ours() -> None:
    run_program("first = template('a'); assert render(first) == 'a'")
    run_program(
        "first = template('{{ 1 / 0 }}{')\n"
        "for _ in range(2):\n"
        "    try: render(first)\n"
        "    except ChatTemplateError: pass"
    )


@POSIX
@pytest.mark.parametrize("redirect", ["<&-", "<&- 1<&- ", "</dev/null"])
def test_ours_needs_no_streams(redirect: str) -> None:
    run_program("assert render(template('a')) == 'a'", redirect)


@POSIX
def test_ctrl_c_at_the_terminal_does_not_reach_it() -> None:
    run_program(
        # A shell starts what it runs in the background with the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "first = template('a'); render(first)\n"
        "try:\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    while True: time.sleep(0.01)\n"  # not pause: another thread may be the one that the signal wakes
        "except KeyboardInterrupt: pass\n"
        "assert children(); assert render(first) == 'a'"
    )


@POSIX
def test_hostile_templates_take_little_of_our_memory() -> None:
    run_program(
        f"before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"for source in {TOO_MUCH + TOO_DEEP[:3]!r}:\n"
        "    try: render(template(source))\n"
        "    except ChatTemplateError: continue\n"
        "    assert False, source\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 32 * 2**20\n"
        "assert sys.platform == 'darwin' or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit < 600 * 2**20"
    )
