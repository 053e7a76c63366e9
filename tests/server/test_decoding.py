"""The choice of tokens, the strings at which a text stops, and the templates of conversations."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.frontend.templates import rendered
from cohabit.server.ipc.model import LanguageDocument
from cohabit.server.protocol.decoding import Sampler, Sampling, StopStrings, log_probabilities

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))
DRAWS = 4000


def shares(sampling: Sampling) -> dict[int, float]:
    """How often each token is drawn from the same logits."""
    sampler = Sampler(sampling)
    counts = Counter(sampler.choose(LOGITS) for _ in range(DRAWS))
    return {token: count / DRAWS for token, count in counts.items()}


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(seed=0), {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.3, 4: 0.15}),
        (Sampling(seed=0, temperature=0), {1: 1}),
        (Sampling(seed=0, temperature=0.5), {n: p * p for n, p in enumerate((0.05, 0.4, 0.1, 0.3, 0.15))}),
        (Sampling(seed=0, top_k=2), {1: 0.4, 3: 0.3}),
        (Sampling(seed=0, top_k=99), {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.3, 4: 0.15}),
        (Sampling(seed=0, top_p=0.5), {1: 0.4, 3: 0.3}),
        (Sampling(seed=0, top_p=0.0), {1: 1}),
        (Sampling(seed=0, top_p=0.75), {1: 0.4, 3: 0.3, 4: 0.15}),
        (Sampling(seed=0, logit_bias={1: -100.0, 3: -100.0}), {0: 0.05, 2: 0.1, 4: 0.15}),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling, weights: dict[int, float]) -> None:
    found, total = shares(sampling), sum(weights.values())
    assert found == pytest.approx({token: weight / total for token, weight in weights.items()}, abs=0.03)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-30])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_a_temperature_near_zero_takes_the_most_likely_token(temperature: float, more: dict[str, Any]) -> None:
    assert shares(Sampling(seed=0, temperature=temperature, **more)) == {1: 1}


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 30))])
def test_a_nucleus_has_the_fewest_tokens_with_its_share(seed: int) -> None:
    """Compared with a sort, for flat and steep distributions; every drawn token is in it, and all are drawn."""
    draws = np.random.default_rng(seed)
    logits = (draws.standard_normal(40) * draws.choice([0.01, 1, 5])).astype(np.float32)
    share = float(draws.choice([0.1, 0.5, 0.9, 0.999]))
    likely = np.exp(logits.astype(np.float64))
    order = np.argsort(-likely, kind="stable")
    count = int(np.searchsorted(np.cumsum(likely[order]) / likely.sum(), share)) + 1
    sampler = Sampler(Sampling(seed=seed, top_p=share))
    found = Counter(sampler.choose(logits) for _ in range(DRAWS))
    nucleus = set(order[:count].tolist())
    assert set(found) <= nucleus
    weights = likely / likely[order[:count]].sum()
    assert {token: found[token] / DRAWS for token in nucleus} == pytest.approx(
        {token: weights[token] for token in nucleus}, abs=0.04
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(value: float) -> None:
    with pytest.raises(Refused, match="largest logit"):
        Sampler(Sampling()).choose(np.array([0.0, value, 1.0], np.float32))


def test_penalties_count_what_was_generated() -> None:
    sampler = Sampler(Sampling(temperature=0, frequency_penalty=0.5))
    assert [sampler.choose(LOGITS) for _ in range(5)] == [1, 3, 1, 3, 4]
    present = Sampler(Sampling(temperature=0, presence_penalty=2.0))
    assert [present.choose(LOGITS) for _ in range(6)] == [1, 3, 4, 2, 1, 1]


def test_log_probabilities_add_up_to_one() -> None:
    own, likely = log_probabilities(LOGITS * 1, 3, 5)
    assert own == pytest.approx(np.log(0.3), abs=1e-6)
    assert [token for token, _ in likely] == [1, 3, 4, 2, 0]
    assert sum(np.exp(value) for _, value in likely) == pytest.approx(1)


def test_special_tokens_can_be_stop_strings_but_are_never_sent() -> None:
    stops = StopStrings(["fox<|end|>", "<|stop|>"])
    sent = [stops.push("a fo"), stops.push("x "), stops.push("<|sep|>", hidden=True), stops.push("the fox")]
    assert "".join(sent) == "a fox the "
    assert stops.push("<|end|>", hidden=True) == ""
    assert stops.found
    other = StopStrings(["<|sep|>x"])
    assert other.push("<|sep|>", hidden=True) + other.push("y") + other.flush() == "y"


@pytest.mark.parametrize("seed", range(20))
def test_only_allowed_tokens_are_chosen_as_the_logits_of_others_say_nothing(seed: int) -> None:
    draws = np.random.default_rng(seed)
    logits = draws.normal(size=2000).astype(np.float32)
    allowed = draws.random(2000) < draws.choice([0.001, 0.5, 1])
    allowed[draws.integers(2000)] = True
    rest = np.where(allowed, logits, np.float32(-1e30))
    for sampling in (
        Sampling(temperature=0),
        Sampling(seed=seed),
        Sampling(top_p=0.5, seed=seed),
        Sampling(top_k=3),
    ):
        found = Sampler(sampling).choose(logits, allowed)
        assert allowed[found]
        if sampling.temperature == 0:
            assert found == int(np.argmax(rest))
        if sampling.seed is not None:
            assert found == Sampler(sampling).choose(rest)


@pytest.mark.parametrize("seed", range(200))
def test_a_text_in_pieces_is_cut_where_the_whole_would_be(seed: int) -> None:
    draws = random.Random(seed)
    text = "".join(draws.choices("ab.", k=draws.randint(0, 40)))
    strings = ["".join(draws.choices("ab.", k=draws.randint(1, 5))) for _ in range(draws.randint(0, 3))]
    stops, passed, rest = StopStrings(strings), "", text
    while rest and not stops.found:
        size = draws.randint(1, 4)
        passed, rest = passed + stops.push(rest[:size]), rest[size:]
    found = stops.found
    passed += stops.flush()
    # A piece may end before a longer string that begins earlier: the first that is complete counts.
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in strings if s in text)
    assert found == bool(ends)
    if not found:
        assert passed == text
    else:
        assert text.startswith(passed)
        assert not any(string in passed for string in strings)
        assert any(text[len(passed) :].startswith(string) for string in strings)


def document(template: str) -> LanguageDocument:
    return LanguageDocument(chat_template=template, special_tokens={"bos_token": "<s>"})


def test_templates_have_what_those_of_hugging_face_use() -> None:
    template = (
        "{{ bos_token }}{%- for message in messages %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}"
        "<{{ message.role }}>{{ message.content | trim | tojson }}{%- endfor %}{{ '|' if add_generation_prompt }}"
    )
    messages = [{"role": role, "content": ' "ä" '} for role in ("user", "assistant", "user")]
    assert rendered("m", document(template), messages) == '<s><user>"\\"ä\\""<assistant>"\\"ä\\""|'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[7].content }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('not so') }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template of model 'm' does not take these messages"):
        rendered("m", document(template), [{"role": "user", "content": "x"}])


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOPS + ENDS,
        LOOPS + "x" * 1000 + ENDS,
        "{% macro m() %}" + LOOPS + "x" * 1000 + ENDS + "{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% for i in [1, 2] %}{{ m(n + 1) if n < 40 }}{% endfor %}{% endmacro %}{{ m(0) }}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t * 9 %}{% endfor %}",
        "{% set n = namespace(t='xx') %}{% for i in range(60) %}{% set n.t = n.t.replace('x', n.t) %}{% endfor %}",
        "{{ 'x' * messages[0].content.count('x') * 10 ** 9 }}",
        "{{ messages[0].content.ljust(10 ** 9) }}",
        "{{ messages[0].content | center(10 ** 9) }}",
        "{{ '%1000000000d' % messages | length }}",
        "{{ '{:1000000000}'.format(messages | length) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 9 ** 99999999 }}",
    ],
)
def test_a_template_has_bounded_steps_time_and_size(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template of model 'm' was ended, because it"):
        rendered("m", document(template), [{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_what_to_use() -> None:
    with pytest.raises(InvalidRequest, match="send a text to /v1/completions"):
        rendered("m", LanguageDocument(), [])
