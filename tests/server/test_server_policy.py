"""What config.pbtxt says about queueing, and what is refused of it."""

import pytest
from google.protobuf import text_format

from cohabit.server.errors import RepositoryError
from cohabit.server.scheduling.policy import LevelPolicy, Policy
from cohabit.server.triton.model_config import ModelConfig
from cohabit.server.triton.policies import policy_of


def policy(text: str) -> Policy:
    return policy_of(text_format.Parse(text, ModelConfig()))


def test_the_order_is_kept_if_the_config_says_so() -> None:
    assert policy("dynamic_batching { preserve_ordering: true }") == Policy(keeps_order=True)


def test_config_without_a_word_about_queueing_changes_nothing() -> None:
    assert policy('name: "m" max_batch_size: 8') == Policy()
    assert policy("dynamic_batching { }") == Policy()


def test_every_field_is_read() -> None:
    read = policy("""
        max_batch_size: 8
        dynamic_batching {
          preferred_batch_size: [ 8, 4 ]
          max_queue_delay_microseconds: 500
          priority_levels: 2
          default_priority_level: 2
          default_queue_policy { default_timeout_microseconds: 2000000 allow_timeout_override: true max_queue_size: 9 }
          priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1000 } }
        }
        parameters { key: "max_concurrency" value { string_value: "3" } }
        parameters { key: "max_requests_per_second" value { string_value: "12.5" } }
    """)
    assert read == Policy(
        levels=2,
        default_level=2,
        default=LevelPolicy(limit=9, timeout_s=2.0, timeout_may_shorten=True),
        by_level={1: LevelPolicy(timeout_s=0.001, timeout_may_shorten=False, delays_late=True)},
        preferred_batches=(4, 8),
        batch_delay_s=0.0005,
        concurrency=3,
        rate_per_s=12.5,
        burst=12,
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level is 0, it must be from 1 to 2"),
        ("dynamic_batching { default_priority_level: 1 }", "priority_levels is 0"),
        ("dynamic_batching { priority_levels: 5000 default_priority_level: 1 }", "the most is 1024"),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1"
            " priority_queue_policy { key: 3 value { } } }",
            "level 3, the last one is 2",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "preserve_ordering",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
            "preserve_ordering",
        ),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "from 1 to max_batch_size 4"),
        ('parameters { key: "max_concurrency" value { string_value: "none" } }', "'max_concurrency'"),
        ('parameters { key: "max_requests_per_second" value { string_value: "-1" } }', "'max_requests_per_second'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(text: str, reason: str) -> None:
    with pytest.raises(RepositoryError, match=reason):
        policy(text)
