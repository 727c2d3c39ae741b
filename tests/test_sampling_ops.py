"""From logits to distributions: against transformers, against sorting everything, and all bits against numpy's."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pilotfish import SamplingParams, _kernels
from pilotfish.errors import NonFiniteLogitsError
from pilotfish.ops import native, sampling_reference
from pilotfish.ops import reference as ops
from pilotfish.ops.native import NativeBackend
from pilotfish.ops.sampling import (
    Distribution,
    TokenHistory,
    greedy_token,
    next_distribution,
    process_logits,
    token_logprobs,
)

NATIVE = [NativeBackend(_kernels, isa, 1) for isa in _kernels.instruction_sets()]


@pytest.fixture(params=["native", "reference"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, and the way it goes where they were not built."""
    if request.param == "reference":
        monkeypatch.setattr(native, "default_backend", lambda: None)


either = pytest.mark.usefixtures("_either")
either_for_all = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the same for every example


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """One row of logits of many kinds: peaked and flat, with ties, with -infinity, with zeros of both signs, huge."""
    size = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 200, 1000, 5003]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(size=size) * draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 1e3, 1e30]))
    kind = draw(st.sampled_from(["plain", "ties", "few", "banned"]))
    if kind == "ties":
        x = np.round(x)
        x[rng.random(size) < 0.2] = -0.0
    elif kind == "few":
        x = rng.choice(np.array([0.0, -0.0, 1.0, -3e38, 3e38, 1e-45, -np.inf]), size)
    elif kind == "banned":
        x[rng.random(size) < 0.7] = -np.inf
    if not (x > -np.inf).any():
        x[rng.integers(size)] = 0.0
    return torch.from_numpy(x.astype(np.float32))


# Each filter is off as often as on: only then all that the others leave is seen.
FILTERS = st.tuples(
    st.sampled_from([5e-324, 1e-300, 1e-9, 0.1, 0.7, 1.0, 1.5, 100.0]),
    st.just(0) | st.sampled_from([1, 2, 3, 16, 40, 78, 100, 1000, 10**6]),
    st.just(1.0) | st.sampled_from([1 - 2**-53, 0.999, 0.95, 0.5, 0.1, 1e-9, 5e-324]),
    st.just(0.0) | st.sampled_from([1e-300, 0.01, 0.1, 0.5, 1.0]),
)


def same(one: Distribution | None, other: Distribution | None) -> bool:
    """Whether every bit is equal."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.probs, other.probs)


def plain(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[dict[int, float], float]:
    """The definition with sorting and exact sums, in Python's floats: probabilities by id, and how close the nearest
    decision was, as a share of what it compared."""
    x = logits.double().tolist()
    largest = max(x)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    weights = [math.exp(max((value - largest) / max(temperature, 1e-300), -740)) for value in x]
    weights = [weight if weight > 1e-282 else 0.0 for weight in weights]
    order = order[:top_k] if top_k else order
    margin = 1.0
    if top_p < 1:
        total = math.fsum(weights[i] for i in order)
        kept, running = [], 0.0
        for i in order:
            kept.append(i)
            running += weights[i]
            margin = min(margin, abs(running - top_p * total) / total)
            if running >= top_p * total:
                break
        order = kept
    if min_p > 0:
        margin = min([margin, *(abs(weights[i] - min_p) for i in order if weights[i] not in (0, 1))])
    order = [i for i in order if weights[i] > 0 and weights[i] >= min_p]
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in sorted(order)}, margin


@given(rows(), FILTERS)
def test_a_distribution_is_what_sorting_everything_gives(logits: Tensor, filters: tuple) -> None:
    expected, margin = plain(logits, *filters)
    found = NATIVE[0].distribution(logits, *filters)
    assert found.token_ids.dtype == np.int32
    assert (np.diff(found.token_ids) > 0).all()
    assert (found.probs > 0).all()
    assert found.probs.sum() == pytest.approx(1, rel=1e-12)
    if margin > 1e-12:
        assert found.token_ids.tolist() == list(expected)
        np.testing.assert_allclose(found.probs, list(expected.values()), rtol=1e-12)


@given(rows(), FILTERS, st.integers(0, 2**64 - 1))
def test_all_instruction_sets_and_the_reference_give_the_same_bits(logits: Tensor, filters: tuple, stream: int) -> None:
    expected = sampling_reference.distribution(logits, *filters)
    drawn = sampling_reference.gumbel_argmax(expected, stream)
    count = max(filters[1], 1)
    largest = sampling_reference.largest(logits, count)
    for backend in NATIVE:
        assert same(backend.distribution(logits, *filters), expected), backend.isa
        assert backend.gumbel_argmax(expected, stream) == drawn, backend.isa
        assert np.array_equal(backend.largest(logits, count), largest), backend.isa


@pytest.mark.parametrize(
    "filters", [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (2.0, 0, 0.9, 0.01), (1.0, 3000, 0.9, 0.0)]
)
def test_a_whole_vocabulary_gives_the_same_bits(filters: tuple) -> None:
    logits = 3 * torch.randn(151_936, generator=torch.Generator().manual_seed(5))
    expected = sampling_reference.distribution(logits, *filters)
    for backend in NATIVE:
        found = backend.distribution(logits, *filters)
        assert same(found, expected)
        for stream in range(20):
            assert backend.gumbel_argmax(found, stream) == sampling_reference.gumbel_argmax(expected, stream)


@given(rows(), rows(), st.sampled_from(["any", "same ids", "equal"]))
def test_all_variants_and_the_reference_leave_the_same_residual(logits: Tensor, other: Tensor, q_is: str) -> None:
    p = sampling_reference.distribution(logits, 1.0, 0, 1.0, 0.0)
    q = {
        "any": sampling_reference.distribution(other, 2.0, 40, 1.0, 0.0),
        "same ids": Distribution(p.token_ids, p.probs[::-1].copy()),
        "equal": p,
    }[q_is]
    expected = sampling_reference.residual(p, q)
    drafted = dict(zip(q.token_ids.tolist(), q.probs.tolist(), strict=True))
    left = {i: prob - drafted.get(i, 0.0) for i, prob in zip(p.token_ids.tolist(), p.probs.tolist(), strict=True)}
    left = {i: prob for i, prob in left.items() if prob > 0}
    if left:
        assert expected.token_ids.tolist() == list(left)
        np.testing.assert_allclose(expected.probs, [prob / math.fsum(left.values()) for prob in left.values()], 1e-12)
    else:
        assert expected is None
    for backend in NATIVE:
        assert same(backend.residual(p, q), expected), backend.isa


def test_the_kernels_pass_over_no_id_that_wins_by_little() -> None:
    """Of so many draws dozens are decided by a part in a hundred."""
    probs = np.random.default_rng(0).dirichlet(np.full(300, 0.5))
    distribution = Distribution(np.arange(300, dtype=np.int32), np.maximum(probs, 1e-300))
    for stream in range(5000):
        expected = sampling_reference.gumbel_argmax(distribution, stream)
        assert {backend.gumbel_argmax(distribution, stream) for backend in NATIVE} == {expected}


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_sound_gives_nothing(size: int, value: float) -> None:
    for place in {0, size // 2, size - 1}:
        logits = torch.zeros(size)
        logits[place] = value
        for implementation in (sampling_reference, *NATIVE):
            assert implementation.distribution(logits, 1.0, 0, 1.0, 0.0) is None
            assert implementation.distribution(logits, 1.0, 1, 0.5, 0.1) is None
            assert implementation.largest(logits, 1) is None
            assert implementation.distribution(torch.full((size,), -torch.inf), 1.0, 0, 1.0, 0.0) is None


# -- the chain --------------------------------------------------------------------------------------------------------


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 7, 40]),
    st.sampled_from([1.0, 0.95, 0.5]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.dictionaries(st.integers(0, 299), st.floats(-20, 20, width=32), max_size=5),
    st.integers(0, 6),
)
def test_the_chain_is_that_of_transformers(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    logit_bias: dict[int, float],
    min_tokens: int,
) -> None:
    logits = 4 * randn(1, 300, seed=seed)
    rng = np.random.default_rng(seed)
    prompt, output, ends = rng.integers(0, 300, 20).tolist(), rng.integers(0, 300, 3).tolist(), [7, 11]
    chain = LogitsProcessorList()
    if logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in logit_bias.items()]))
    chain.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, ends))
    edited = chain(torch.tensor([prompt + output]), logits.clone())
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    expected = chain(torch.tensor([prompt + output]), edited.double()).softmax(dim=-1)[0].numpy()

    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
        min_tokens=min_tokens,
    )
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    assert torch.equal(process_logits(logits[0], sampling, history, (), ends), edited[0])
    found = next_distribution(logits[0], sampling, history, (), ends)
    probs = np.zeros(300)
    probs[found.token_ids] = found.probs
    np.testing.assert_allclose(probs, expected, rtol=1e-9)


@either
@either_for_all
@given(st.data())
def test_penalties_count_each_row_s_own_history(data: st.DataObject) -> None:
    vocab_size = 12
    ids = st.integers(0, vocab_size - 1)
    prompt = data.draw(st.lists(ids, min_size=1, max_size=6))
    output = data.draw(st.lists(ids, max_size=6))
    draft = data.draw(st.lists(ids, max_size=5))
    repetition, frequency, presence = data.draw(
        st.tuples(
            st.sampled_from([1.0, 1.5, 0.5]), st.sampled_from([0.0, 0.7, -2.0]), st.sampled_from([0.0, 0.3, -1.0])
        )
    )
    sampling = SamplingParams(
        temperature=1.0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    logits = 2 * randn(len(draft) + 1, vocab_size, seed=len(prompt))
    raw = logits.clone()
    for row in range(len(logits)):
        found = next_distribution(logits[row], sampling, history, draft[:row])
        expected = logits[row].double().tolist()
        counts = Counter(output + draft[:row])
        for token_id in {*prompt, *output, *draft[:row]}:
            value = expected[token_id]
            expected[token_id] = value / repetition if value > 0 else value * repetition
        for token_id, count in counts.items():
            expected[token_id] -= frequency * count + presence
        np.testing.assert_allclose(found.probs, torch.tensor(expected).softmax(dim=0), rtol=1e-5)
    assert torch.equal(logits, raw)


ALL_OPTIONS = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={3: 2.0, 90: -4.0},
    min_tokens=4,
)


@either
@pytest.mark.parametrize("sampling", [ALL_OPTIONS, SamplingParams(temperature=1.0)])
def test_draft_tokens_count_as_if_they_had_been_put_out(sampling: SamplingParams) -> None:
    logits, draft, ends = 4 * randn(5, 3000), [5, 90, 5, 5], [1, 2]
    history, grown = TokenHistory([3, 4]), TokenHistory([3, 4])
    for row in range(5):
        found = next_distribution(logits[row], sampling, history, draft[:row], ends)
        assert same(found, next_distribution(logits[row].clone(), sampling, grown, (), ends))
        token_id = greedy_token(logits[row], sampling, history, draft[:row], ends)
        assert token_id == greedy_token(logits[row].clone(), sampling, grown, (), ends)
        grown.append(draft[min(row, 3)])


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 12))
def test_a_history_knows_the_same_however_it_came(prompt: list[int], output: list[int], cut: int) -> None:
    history = TokenHistory(prompt)
    for token_id in output[:cut]:
        history.append(token_id)
    token_ids, counts = history.counts(output[cut:])
    assert token_ids.dtype == counts.dtype == np.int32
    assert token_ids.tolist() == list(dict.fromkeys(prompt + output))
    assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == {i: output.count(i) for i in token_ids}
    assert history.num_output_tokens == len(output[:cut])
    assert history.counts()[0].tolist() == list(dict.fromkeys(prompt + output[:cut]))  # the draft left no trace


@either
def test_min_tokens_forbids_ends_row_by_row() -> None:
    logits = torch.zeros(5)
    logits[2] = 9.0
    history = TokenHistory([0])
    history.append(1)
    sampling = SamplingParams(temperature=1.0, top_k=1, min_tokens=3, logit_bias={2: 50})
    for num_drafted, expected in enumerate([0, 0, 2, 2]):
        drafted, ends = [4] * num_drafted, [2, 3]
        assert next_distribution(logits, sampling, history, drafted, ends).token_ids.tolist() == [expected]
        assert greedy_token(logits, sampling, history, drafted, ends) == expected


@either
@either_for_all
@given(rows())
def test_greedy_and_tiny_temperatures_take_the_argmax(logits: Tensor) -> None:
    filters = SamplingParams(top_k=5, top_p=0.5, min_p=0.5)
    assert [greedy_token(logits, filters, TokenHistory([]))] == ops.argmax(logits[None])
    for temperature in (5e-324, 1e-300, 1e-100):
        tiny = next_distribution(logits, SamplingParams(temperature=temperature), TokenHistory([]))
        assert tiny.token_ids.tolist() == torch.nonzero(logits == logits.max()).flatten().tolist()
        np.testing.assert_allclose(tiny.probs, 1 / len(tiny.probs), rtol=1e-15)


@either
@pytest.mark.parametrize("bad", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_a_bad_row_is_an_error_that_names_it(bad: list[float]) -> None:
    logits, history = torch.tensor(bad), TokenHistory([])
    with pytest.raises(NonFiniteLogitsError, match="row 3"):
        next_distribution(logits, SamplingParams(temperature=1.0), history, row=3)
    with pytest.raises(NonFiniteLogitsError, match="row 3"):
        greedy_token(logits, SamplingParams(), history, row=3)


@pytest.mark.parametrize("backend", NATIVE)
def test_kernels_are_given_nothing_that_they_cannot_read(backend: NativeBackend) -> None:
    logits, nan = torch.zeros(7), math.nan
    for options in ((0.0, 0, 1, 0), (nan, 0, 0.5, 0), (-1.0, 0, 1, 0), (1.0, -1, 1, 0), (1.0, 0, 0.0, 0)):
        with pytest.raises(ValueError, match="distribution"):
            backend.distribution(logits, *options)
    for options in ((1.0, 0, nan, 2.0), (1.0, 0, 1.1, 0), (1.0, 0, 1, -0.1), (1.0, 0, 1, 1.1), (1.0, 0, 1, nan)):
        with pytest.raises(ValueError, match="distribution"):
            backend.distribution(logits, *options)
    for some, count in ((logits, 0), (logits, -1), (logits[:0], 1)):
        with pytest.raises(ValueError, match="largest"):
            backend.largest(some, count)
    with pytest.raises(ValueError, match="0 logits"):
        backend.distribution(logits[:0], 1.0, 0, 1.0, 0.0)


def test_arrays_that_do_not_fit_together_are_no_distribution() -> None:
    for token_ids, probs in (([0], [0.5, 0.5]), ([], []), ([[0]], [[1.0]])):
        with pytest.raises(ValueError, match="distribution"):
            Distribution(np.array(token_ids, np.int32), np.array(probs, np.float64))
    with pytest.raises(ValueError, match="int64"):
        Distribution(np.array([0]), np.ones(1))


@either
@either_for_all
@given(rows(), st.integers(0, 20))
def test_logprobs_are_those_of_the_raw_logits(logits: Tensor, num_top: int) -> None:
    token_id = len(logits) // 2
    (found,) = token_logprobs(logits[None], [token_id], num_top)
    expected = logits.double().log_softmax(dim=0).float()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))[:num_top]
    assert list(found.top_token_ids) == order
    scale = max(1.0, float(logits[logits > -torch.inf].abs().max()))
    np.testing.assert_allclose(found.top_logprobs, expected[order], rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(found.logprob, expected[token_id], rtol=1e-5, atol=1e-6 * scale)


@either
def test_logprobs_of_a_row_do_not_depend_on_its_neighbours() -> None:
    logits = 4 * randn(5, 3000)
    together = token_logprobs(logits, [1, 2, 3, 4, 5], 4)
    assert together == [token_logprobs(logits[i : i + 1], [i + 1], 4)[0] for i in range(5)]
    logits[3, 7] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="row 3"):
        token_logprobs(logits, [1, 2, 3, 4, 5], 0)
