"""Fields that OpenAI, vLLM, SGLang, llama.cpp and other servers support and this server does not.

Each of them would change the response, so a body that sets one is refused. The values listed for a field are accepted,
because they ask for the behaviour that this server has; null is always accepted. Other unknown fields are ignored:
`user`, `metadata` and the like do not change the response, and clients send fields of many other servers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bagu.serve.http.errors import ApiError

Fields = Mapping[str, tuple[Any, ...]]  # name -> the accepted values


def _never(names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), ())


_CONSTRAINTS: Fields = _never(
    "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern "
    "structural_tag grammar grammar_lazy grammar_triggers json_schema regex ebnf format"
)
_FUNCTIONS: Fields = {"functions": ([],), "function_call": ("none", "auto")}  # the older name of tools
_SAMPLERS: Fields = _never(
    "logits_processors custom_logit_processor custom_params samplers thinking_token_budget thinking_budget_tokens "
    "repetition_detection vllm_xargs prompt_embeds input_embeds stop_regex speculative"
) | {
    "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1, 1.0), "early_stopping": (False,),
    "bad_words": ([],), "bad_words_ids": ([],), "allowed_token_ids": (), "do_sample": (True,), "num_beams": (1,),
    "typical_p": (1, 1.0), "typ_p": (1, 1.0), "tfs_z": (1, 1.0), "top_a": (0, 0.0), "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0), "top_n_sigma": (-1, -1.0), "nsigma": (0, 0.0), "repeat_penalty": (1, 1.0),
    "repeat_last_n": (), "penalize_nl": (False,), "no_repeat_ngram_size": (0,), "mirostat": (0,), "mirostat_tau": (),
    "mirostat_eta": (), "dynatemp_range": (0, 0.0), "dynatemp_exponent": (1, 1.0), "smoothing_factor": (0, 0.0),
    "xtc_probability": (0, 0.0), "xtc_threshold": (), "dry_multiplier": (0, 0.0), "dry_base": (),
    "dry_allowed_length": (), "dry_penalty_last_n": (), "dry_sequence_breakers": (), "min_keep": (0,),
    "adaptive_target": (), "adaptive_decay": (), "watermark": (False,), "random_seed": (), "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
}  # fmt: skip
_LENGTHS: Fields = _never(  # other names of max_tokens, and truncation of prompts
    "n_predict max_new_tokens max_length num_predict min_new_tokens min_length t_max_predict_ms t_max_prompt_ms n_keep "
    "n_discard n_indent truncate truncate_prompt_tokens truncation truncation_side max_prompt_tokens context_length"
)
_OUTPUTS: Fields = {  # more fields in the response
    "n_probs": (0,), "top_n_tokens": (0,), "return_token_ids": (False,), "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,), "return_full_text": (False,), "return_progress": (False,),
    "return_meta_info": (False,), "return_prompt_token_ids": (False,), "decoder_input_details": (False,),
    "details": (False,), "post_sampling_probs": (False,), "timings_per_token": (False,), "response_fields": (),
    "background": (False,), "logprob_start_len": (-1,), "prompt_logprob_start_len": (),
}  # fmt: skip
_MODELS: Fields = _never(
    "audio prediction web_search_options reasoning reasoning_effort thinking think moderation cache_salt image_data "
    "images mm_processor_kwargs media_io_kwargs documents lora lora_path lora_request adapter_id draft_model "
    "session_params kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room options "
    "safe_prompt prompt_mode provider plugins transforms models route guardrails"
) | {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "id_slot": (-1,),
    "thinking_forced_open": (False,),
    "parse_tool_calls": (True,),
}
_GENERATION: Fields = {**_CONSTRAINTS, **_FUNCTIONS, **_SAMPLERS, **_LENGTHS, **_OUTPUTS, **_MODELS}

COMPLETION: Fields = {
    **_GENERATION,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    **_never("messages input max_completion_tokens chat_template system raw template"),
    "suffix": ("",),
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
    "add_special_tokens": (True,),
}
CHAT: Fields = {
    **_GENERATION,
    **_never("prompt input chat_template system"),
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
}
EMBEDDING: Fields = {
    **_never(
        "dimensions messages prompt chat_template chat_template_kwargs truncate truncate_prompt_tokens truncation "
        "mm_processor_kwargs embed_dtype output_dtype embedding_types task input_type instruction prompt_name image "
        "lora_path embd_normalize"
    ),
    "normalize": (True,),
    "add_special_tokens": (True,),
    "endianness": ("native", "little"),
    "use_activation": (True,),
    "output_dimension": (),
}
TOKENIZE: Fields = {
    **_never("content input text chat_template chat_template_kwargs mm_processor_kwargs documents"),
    "tools": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "return_token_strs": (False,),
    "with_pieces": (False,),
    "parse_special": (False,),
    "add_special": (True,),
}
DETOKENIZE: Fields = {**_never("ids input"), "skip_special_tokens": (False,)}
SCORE: Fields = _never(
    "truncate_prompt_tokens truncation mm_processor_kwargs chat_template instruction softmax data_1 data_2 queries "
    "items rank_fields max_chunks_per_doc max_tokens_per_doc overlap_tokens"
)
RESPONSES: Fields = {
    **_never("conversation prompt messages max_tokens max_completion_tokens response_format reasoning functions"),
    **_never("function_call max_tool_calls context_management moderation n"),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
LOAD_ADAPTER: Fields = {"load_inplace": (False,)}
STREAM_OPTIONS: Fields = {"continuous_usage_stats": (False,)}
STRUCTURED_OUTPUTS: Fields = {
    **_never("structural_tag"),
    "disable_fallback": (False,),
    "disable_any_whitespace": (False, True),
    "disable_additional_properties": (False,),
}


def refuse_unsupported(sent: Mapping[str, Any], fields: Fields, *, within: str = "") -> None:
    """Raise 400 for the first unsupported field of `sent`; `within` is the name of the object that contains it."""
    for name, accepted in fields.items():
        value = sent.get(name)
        if value is not None and not _is_one_of(value, accepted):
            hint = f"leave {name} out" + (f", or send {' or '.join(map(repr, accepted))}" if accepted else "")
            param = f"{within}.{name}" if within else name
            raise ApiError(400, f"{param} is not supported by this server", param=param, hint=hint)


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    """Compare JSON values: true is not 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
