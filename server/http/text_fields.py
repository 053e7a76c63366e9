"""Fields of requests for texts that are not supported: ignored if they cannot change a text, and refused otherwise."""

from collections.abc import Mapping
from typing import Any

import msgspec

from cohabit.server.errors import InvalidRequest, did_you_mean

_HARMLESS = frozenset({
    "metadata", "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
"""Fields that do not change what a text may be, and are ignored."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's.
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": ("none", "auto"), "functions": ([],),
    "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False), "prediction": (),
    "reasoning_effort": ("none",), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",), "web_search_options": (),
    # Those of other servers of the protocol.
    "add_generation_prompt": (True,), "add_special_tokens": (True,), "allowed_token_ids": ([],), "chat_template": (),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "documents": ([],), "early_stopping": (False,),
    "grammar": ("",), "guided_grammar": (),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logits_processors": ([],), "min_p": (0,),
    "min_tokens": (0,), "mirostat": (0,), "prompt_logprobs": (), "repetition_penalty": (1,),
    "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],), "truncate_prompt_tokens": (), "typical_p": (1,),
    "use_beam_search": (False,),
    # Those of Triton's language model backends.
    "bad_words": ("", []), "beam_width": (1,), "do_sample": (True,), "exclude_input_in_output": (True,),
    "return_log_probs": (False,),
}  # fmt: skip
"""Fields that are not supported, with the values that an absent field stands for. `null` always stands for it."""
_MOST_NEUTRAL_BYTES = 64


def refuse_unsupported(sent: Mapping[str, msgspec.Raw], of_type: type[msgspec.Struct]) -> None:
    """Raise InvalidRequest for a field that is not of the type, unless it cannot change the answer."""
    known = {field.encode_name for field in msgspec.structs.fields(of_type)}
    for name in sent.keys() - known - _HARMLESS:
        raw = bytes(sent[name])
        if name not in _NEUTRAL:
            raise InvalidRequest(f"'{name[:80]}' is not a field of this request{did_you_mean(name[:80], known)}")
        value = msgspec.json.decode(raw) if len(raw) <= _MOST_NEUTRAL_BYTES else raw
        if value is not None and value not in _NEUTRAL[name]:
            raise InvalidRequest(f"{name} is not supported; leave it out")
