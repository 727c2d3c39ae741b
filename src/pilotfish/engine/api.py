"""The library's front door: `stream`, `generate` and `speculative_generate`, which all run the one decode step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pilotfish.config import DEFAULT_PROPOSAL_LENGTH
from pilotfish.decode import SequenceState
from pilotfish.drafters import Drafter, DraftModelDrafter
from pilotfish.engine.generation import GenerationStream
from pilotfish.errors import OptionError, PromptError
from pilotfish.kvcache import DenseCache, KVCache
from pilotfish.model.batch import ForwardModel, prefill
from pilotfish.tokenizer import Tokenizer, check_pair
from pilotfish.types import FinishEvent, GenerationResult, SamplingParams, check_count

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Raw text, chat messages (`role`, `content`), or token ids."""


def stream(
    model: ForwardModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    proposal_length: int | None = None,
    sampling: SamplingParams | None = None,
    context_length: int | None = None,
    enable_thinking: bool = False,
    cache: KVCache | None = None,
    max_num_batched_tokens: int = 128,
    clock: Callable[[], float] = time.perf_counter,
    answer: int | None = None,
) -> GenerationStream:
    """Starts an answer and returns its events as they are decided; nothing runs before the first `next`.

    `proposal_length` is the most tokens drafted per step: 4 with a drafter, 0 without; 0 never touches the drafter.
    `context_length` bounds prompt and output together, the model's own by default. `enable_thinking` is for
    chat messages: what their template is told. `cache` takes the target's keys and values, a `DenseCache` by default;
    it is released at the end. `answer`, from 0, says which of `sampling.n` answers this is; where there is one, it need
    not.

    Raises `OptionError` for a bad option, `PromptError` for a prompt that encodes to nothing or leaves no room, and for
    chat messages `ChatTemplateError`.
    """
    if proposal_length is None:
        proposal_length = DEFAULT_PROPOSAL_LENGTH if drafter is not None else 0
    check_count("proposal_length", proposal_length)
    if proposal_length > 0 and drafter is None:
        raise OptionError(f"proposal_length is {proposal_length}, which needs a drafter; give one, or 0")
    if check_count("max_num_batched_tokens", max_num_batched_tokens) < 1:
        raise OptionError("max_num_batched_tokens must be at least 1")
    limit = model.config.context_length
    if context_length is None:
        context_length = limit
    if not 1 <= check_count("context_length", context_length) <= limit:
        raise OptionError(f"context_length must be from 1 to the model's own {limit}, got {context_length}")
    token_ids = encode_prompt(tokenizer, prompt, enable_thinking=enable_thinking)
    if len(token_ids) >= context_length:
        raise PromptError(
            f"the prompt has {len(token_ids)} tokens, which leaves no room in the context of {context_length}; "
            "shorten it, or raise the context length if the model allows"
        )
    sampling = sampling or SamplingParams()
    _check_ids_of_options(tokenizer, sampling)
    sequence = SequenceState(
        request_id=uuid.uuid4().hex,
        token_ids=token_ids,
        cache=DenseCache(model.config, context_length) if cache is None else cache,
        sampling=sampling,
        eos_token_ids=tokenizer.eos_token_ids,
        context_length=context_length,
        detokenizer=tokenizer.detokenizer(),
        answer=_number_of_answer(sampling, answer),
    )
    return GenerationStream(
        sequence,
        model,
        drafter if proposal_length > 0 else None,
        proposal_length,
        max_num_batched_tokens,
        clock,
    )


def generate(
    model: ForwardModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    proposal_length: int | None = None,
    sampling: SamplingParams | None = None,
    context_length: int | None = None,
    enable_thinking: bool = False,
    answer: int | None = None,
) -> GenerationResult:
    """The whole answer; arguments and errors are those of `stream`."""
    with stream(
        model,
        tokenizer,
        prompt,
        drafter=drafter,
        proposal_length=proposal_length,
        sampling=sampling,
        context_length=context_length,
        enable_thinking=enable_thinking,
        answer=answer,
    ) as events:
        for event in events:
            if isinstance(event, FinishEvent):
                return event.result
    raise AssertionError("a stream ends with a FinishEvent")


def generate_answers(
    model: ForwardModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    sampling: SamplingParams,
    drafter: Drafter | None = None,
    proposal_length: int | None = None,
    context_length: int | None = None,
    enable_thinking: bool = False,
) -> list[GenerationResult]:
    """`sampling.n` whole answers, one after the other; arguments and errors are those of `stream`.

    With a seed, answer i draws from seed and i: it is the same whatever n is.
    """
    return [
        generate(
            model,
            tokenizer,
            prompt,
            drafter=drafter,
            proposal_length=proposal_length,
            sampling=sampling,
            context_length=context_length,
            enable_thinking=enable_thinking,
            answer=answer,
        )
        for answer in range(sampling.n)
    ]


def speculative_generate(
    draft_model: ForwardModel,
    model: ForwardModel,
    draft_tokenizer: Tokenizer,
    tokenizer: Tokenizer,
    prompt: str,
    proposal_length: int = DEFAULT_PROPOSAL_LENGTH,
    max_tokens: int | None = None,
) -> str:
    """The text with which `model` continues `prompt` greedily, guessed ahead by `draft_model`.

    The prompt is encoded as it is, without chat template or special tokens. `proposal_length` 0 is a target-only run:
    the draft model and its tokenizer are not touched. `max_tokens` None leaves the end to EOS and the context.

    Raises `OptionError` (a `ValueError`) unless both numbers are non-negative integers, `PairMismatchError` where the
    two models do not read token ids alike, and `PromptError` as `stream` does; all before either model runs.
    """
    check_count("proposal_length", proposal_length)
    sampling = SamplingParams(max_tokens=max_tokens)
    drafter = None
    if proposal_length > 0:
        drafter = DraftModelDrafter(draft_model, check_pair(draft_tokenizer, tokenizer, prompt))
    return generate(
        model,
        tokenizer,
        tokenizer.encode(prompt),
        drafter=drafter,
        proposal_length=proposal_length,
        sampling=sampling,
    ).text


def next_token_logits(model: ForwardModel, token_ids: Sequence[int], *, max_num_batched_tokens: int = 128) -> Tensor:
    """What `model` says may follow some tokens: float32 [vocab_size], the very logits that decoding sees there.

    Raises `PromptError` for no tokens at all, `CacheFullError` for more than the model's context.
    """
    if not token_ids:
        raise PromptError("there are no tokens to continue")
    cache = DenseCache(model.config)
    try:
        return prefill(model, cache, token_ids, max_num_batched_tokens)[0]
    finally:
        cache.release()


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, *, enable_thinking: bool = False) -> list[int]:
    """A prompt's token ids. Raises `PromptError` for one that is empty, of another form, or has unknown ids,
    `OptionError` for `enable_thinking` without chat messages, and `ChatTemplateError`.
    """
    is_chat = (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and all(isinstance(message, Mapping) for message in prompt)
    )
    if enable_thinking and not is_chat:
        raise OptionError("enable_thinking needs a prompt of chat messages: it is a variable of the chat template")
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, add_special_tokens=True)
    elif is_chat:
        token_ids = tokenizer.encode_chat(prompt, enable_thinking=enable_thinking) if prompt else []  # type: ignore[arg-type]
    elif isinstance(prompt, Sequence):
        token_ids = [_known_id(tokenizer, token_id) for token_id in prompt]
    else:
        raise PromptError(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    if not token_ids:
        raise PromptError("the prompt is empty: there is nothing to continue")
    return token_ids


def _number_of_answer(sampling: SamplingParams, answer: int | None) -> int:
    if answer is None and sampling.n > 1:
        raise OptionError(
            f"n is {sampling.n}, and this gives one answer: say which, with answer from 0 to {sampling.n - 1}, or take "
            "generate_answers"
        )
    number = check_count("answer", 0 if answer is None else answer)
    if number >= sampling.n:
        raise OptionError(f"answer must be below n, {sampling.n}, got {number}")
    return number


def _check_ids_of_options(tokenizer: Tokenizer, sampling: SamplingParams) -> None:
    """Raises `OptionError` for an option that names an id which the model does not have, or never says."""
    for name, token_ids in (("logit_bias", dict(sampling.logit_bias)), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in token_ids:
            if token_id >= tokenizer.vocab_size:
                most = tokenizer.vocab_size - 1
                raise OptionError(f"{name} must name token ids of this model, from 0 to {most}, got {token_id}")
            if token_id in tokenizer.padding_token_ids:
                raise OptionError(f"{name} names token id {token_id}, which is padding in this model: it is never said")


def _known_id(tokenizer: Tokenizer, token_id: object) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < tokenizer.vocab_size:
        raise PromptError(f"{token_id!r} is not a token id of this model (0 to {tokenizer.vocab_size - 1})")
    if token_id in tokenizer.padding_token_ids:
        raise PromptError(f"token id {token_id} is padding in this model: it stands for no text")
    return token_id
