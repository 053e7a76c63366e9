"""The choice of tokens, the strings at which a text stops, and the templates of conversations."""

import random
from collections import Counter

import numpy as np
import pytest

from cohabit.server.errors import InvalidRequest
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


def test_a_model_without_a_template_says_what_to_use() -> None:
    with pytest.raises(InvalidRequest, match="send a text to /v1/completions"):
        rendered("m", LanguageDocument(), [])
