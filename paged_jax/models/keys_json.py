"""The keys of a Hugging Face folder's JSON files, and what becomes of each: three tables.

A key is APPLIED, or has no effect on what is generated (the table says why), or is harmless at some values only
(`Only`): at others a config.json is refused, and the other files are read with a note that names key and value. A key
that no table has is named in a note too. null is as if the key were not there.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

APPLIED = "applied"
_TRAINING, _OUTPUT, _NAME = "training", "what transformers hands back besides tokens", "about the file"
_CACHE, _DRAFTS, _BEAMS = (
    "how transformers keeps K and V and attends",
    "another way to the same tokens",
    "beam search: num_beams",
)
_CALLER, _PADDING = "for who generates to say", "padding and truncation, of which there are none here"


class Only(tuple[Any, ...]):
    """The values at which a key is harmless."""


def _all(what: str | Only, *names: str) -> dict[str, str | Only]:
    return dict.fromkeys(names, what)


GENERATION: dict[str, str | Only] = {
    **_all(APPLIED, "do_sample", "temperature", "top_k", "top_p", "eos_token_id"),
    # Samplers that are not here.
    **_all(Only([1]), "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"),
    **_all(Only([0]), "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"),
    **_all(Only([[]]), "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"),
    **_all(Only([[], {}]), "force_words_ids", "constraints", "sequence_bias"),
    **_all(Only(), "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    **_all(Only(), "watermarking_config", "dola_layers", "max_time"),
    **_all(Only([False]), "token_healing", "remove_invalid_values"),
    **_all(Only([0]), "penalty_alpha"),
    **_all(Only([1]), "num_beams", "num_return_sequences"),
    # And those that shape a random choice alone.
    **_all(Only([0]), "min_p", "epsilon_cutoff", "eta_cutoff"),
    **_all(Only([1]), "typical_p", "top_h"),
    **_all(_BEAMS, "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "low_memory"),
    **_all(_CALLER, "max_length", "max_new_tokens"),
    **_all("what the choice of a token does anyway", "renormalize_logits"),
    **_all("sequences begin as their prompts do", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    **_all(_CACHE, "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache"),
    **_all(_CACHE, "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    **_all(_DRAFTS, "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp"),
    **_all(_DRAFTS, "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    **_all(_DRAFTS, "assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
    **_all(_DRAFTS, "max_matching_ngram_size", "speculation_type"),
    **_all(_OUTPUT, "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    **_all(_OUTPUT, "return_dict_in_generate"),
    **_all(_NAME, "transformers_version", "_from_model_config", "trust_remote_code"),
}
RANDOM_ONLY = frozenset(("min_p", "epsilon_cutoff", "eta_cutoff", "typical_p", "top_h"))

CONFIG: dict[str, str | Only] = {
    **_all("as in generation_config.json, where there is none", *GENERATION),
    **_all(APPLIED, "model_type", "text_config", "quantization_config", "vocab_size", "hidden_size"),
    **_all(APPLIED, "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    **_all(APPLIED, "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias", "mlp_bias"),
    **_all(APPLIED, "max_position_embeddings", "original_max_position_embeddings", "rope_parameters"),
    **_all(APPLIED, "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    **_all(APPLIED, "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
    **_all(APPLIED, "use_sliding_window", "max_window_layers", "query_pre_attn_scalar"),
    **_all(APPLIED, "attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings"),
    **_all(APPLIED, "num_local_experts", "num_experts", "num_experts_per_tok", "swiglu_limit", "swiglu_alpha"),
    **_all(APPLIED, "tokenizer_class", "eos_token_id"),
    # Features that no file of these families has been seen with, except as "no".
    **_all(Only([False]), "is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention", "use_mrope"),
    **_all(Only([False]), "rope_interleaved", "lm_head_bias"),
    **_all(Only([{}, []]), "pruned_heads"),
    **_all(Only([1]), "interpolate_factor", "full_attn_mod"),
    **_all("the part of images, which is left out", "vision_config", "boi_token_index", "eoi_token_index"),
    **_all("the part of images, which is left out", "image_token_index", "mm_tokens_per_image"),
    **_all("the part of images, which is left out", "boi_token_id", "eoi_token_id", "image_token_id"),
    **_all(_TRAINING, "attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "router_aux_loss_coef"),
    **_all(_TRAINING, "output_router_logits", "problem_type", "id2label", "label2id", "finetuning_task"),
    **_all("how a product is divided, not what it is", "pretraining_tp", "chunk_size_feed_forward"),
    **_all("num_experts_per_tok and original_max_position_embeddings again", "experts_per_token"),
    **_all("num_experts_per_tok and original_max_position_embeddings again", "initial_context_length"),
    **_all("the dtype is the caller's", "dtype", "torch_dtype"),
    **_all(_OUTPUT, "return_dict", "use_return_dict", "torchscript"),
    **_all(
        _CACHE, "is_decoder", "attn_implementation", "_attn_implementation", "_flash_attn_2_enabled", "use_flash_attn"
    ),
    **_all(_CACHE, "_attn_implementation_autoset", "kv_cache_dtype"),
    **_all(_NAME, "_name_or_path", "architectures", "auto_map", "model_name", "is_llama_config"),
    **_all(_NAME, "transformers.js_config", "unsloth_version", "unsloth_fixed", "task_specific_params"),
    **_all(_NAME, "max_sequence_length", "model_max_length", "prefix", "sep_token_id", "cross_attention_hidden_size"),
}

ROPE: dict[str, str | Only] = {
    **_all(APPLIED, "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
    **_all(APPLIED, "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    **_all(APPLIED, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    **_all(APPLIED, "short_factor", "long_factor"),
    **_all(_TRAINING, "finetuned"),
    **_all("of images: a token of text has one position", "mrope_section"),
}

TOKENIZER: dict[str, str | Only] = {
    **_all(APPLIED, "chat_template", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"),
    **_all(APPLIED, "tokenizer_class", "split_special_tokens"),
    **_all("tokenizer.json says it", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "do_lower_case"),
    **_all("tokenizer.json says it", "unk_id", "errors", "sp_model_kwargs", "vocab_file", "merges_file"),
    **_all("tokenizer.json says it", "tokenizer_file", "special_tokens_map_file", "model_specific_special_tokens"),
    **_all("of BPE the spaces are left as they are", "clean_up_tokenization_spaces", "spaces_between_special_tokens"),
    **_all(Only([False]), "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"),
    **_all("the template says it", "use_default_system_prompt", "chat_control_tokens"),
    **_all(_PADDING, "padding_side", "truncation_side", "max_length", "stride", "truncation_strategy"),
    **_all(_PADDING, "pad_to_multiple_of", "pad_token_type_id", "model_max_length", "max_len"),
    **_all(_OUTPUT, "model_input_names", "response_schema", "response_template", "return_token_type_ids"),
    **_all(_NAME, "name_or_path", "processor_class", "auto_map", "backend", "is_local", "local_files_only", "use_fast"),
    **_all(_NAME, "verbose", "init_inputs", "trust_remote_code", "from_slow", "_commit_hash"),
    "fast_tokenizer_files": Only([["tokenizer.json"], []]),
}


def not_harmless(table: Mapping[str, str | Only], fields: Mapping[str, Any]) -> Iterator[tuple[str, Only]]:
    """The keys that are `Only` harmless at other values than these."""
    for key, value in fields.items():
        what = table.get(key)
        if isinstance(what, Only) and value is not None and value not in what:
            yield key, what


def unknown(table: Mapping[str, str | Only], fields: Mapping[str, Any]) -> Iterator[str]:
    return (key for key, value in fields.items() if key not in table and value is not None)


def note(place: Any, fields: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """One line that names keys and their values; none if there are none."""
    said = ", ".join(f"{name} = {fields[name]!r:.60}" for name in names)
    return (f"{place}: without effect here: {said}",) if said else ()
