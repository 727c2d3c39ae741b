"""One request from its prompt to its last token, as an iterator of events that cleans up after itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from pilotfish.decode import FixedLength, LengthPolicy, SequenceState, step
from pilotfish.drafters import Drafter
from pilotfish.errors import PilotfishError
from pilotfish.model.batch import ForwardModel
from pilotfish.types import Event, FinishEvent, GenerationResult, TextEvent, TokenOutput
from pilotfish.verify import RequestVerifier


class GenerationStream(Iterator[Event]):
    """Yields a `TextEvent` per step that put tokens out, then one `FinishEvent`.

    The caches are released at the end, when anything raises, on `close` (also at the end of a `with` block) and when
    the stream is dropped. `result` is the answer so far at any time; closed early, its `finish_reason` is `abort`.
    """

    def __init__(
        self,
        sequence: SequenceState,
        model: ForwardModel,
        drafter: Drafter | None,
        proposal_length: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        # First, what `close` needs: it also runs where the rest of this raises.
        self._closed = False
        self._sequence = sequence
        self._drafters = [] if drafter is None else [drafter]
        self._model = model
        self._policy: LengthPolicy = FixedLength(drafter, proposal_length)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock = clock
        self._start = clock()
        self._tokens: list[TokenOutput] = []
        self._error: PilotfishError | None = None
        """What the last step ended with: raised once its tokens are out."""

    @property
    def result(self) -> GenerationResult:
        sequence = self._sequence
        logprobs = tuple(token.logprobs for token in self._tokens if token.logprobs is not None)
        return GenerationResult(
            text="".join(token.text for token in self._tokens),
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=sequence.finish_reason or "abort",
            stats=sequence.stats,
            logprobs=None if sequence.sampling.logprobs is None else logprobs,
        )

    def __next__(self) -> Event:
        try:
            if self._error is not None and not self._closed:
                raise self._error
            while self._sequence.finish_reason is None and not self._closed:
                (output,) = step(
                    [self._sequence],
                    self._model,
                    self._drafters,
                    RequestVerifier(),
                    self._policy,
                    self._clock,
                    self._max_num_batched_tokens,
                )
                self._error = output.error
                if output.tokens:
                    self._count_seconds(is_first=len(output.tokens) == self._sequence.stats.num_tokens)
                    self._tokens += output.tokens
                    return TextEvent(output.tokens)
                if self._error is not None:
                    raise self._error
        except BaseException:
            self.close()
            raise
        if self._closed:
            raise StopIteration
        self.close()
        return FinishEvent(self.result)

    def close(self) -> None:
        """Ends the request and releases its caches; idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._sequence.cache.release()
            finally:
                for drafter in self._drafters:
                    drafter.release(self._sequence.request_id)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _count_seconds(self, is_first: bool) -> None:
        stats = self._sequence.stats
        stats.end_to_end_seconds = self._clock() - self._start
        if is_first:
            stats.prefill_seconds = stats.end_to_end_seconds
        stats.decode_seconds = stats.end_to_end_seconds - stats.prefill_seconds
