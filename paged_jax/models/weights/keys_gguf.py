"""What becomes of every key of a GGUF file's metadata: none that could change an answer is passed over in silence.

The keys are those of the format's makers (the `gguf` package's constants); `*` in one stands for anything, {arch} for
the file's architecture.
"""

import re
from typing import Any, Literal

import numpy as np

from paged_jax.models.weights.gguf import GGUFError, GGUFFile

ARCHITECTURES = ("llama", "gemma3")

Fate = Literal["applied", "without effect", "noted", "refused"]


def refuse_keys(file: GGUFFile, architecture: str) -> None:
    """Raises GGUFError if a key is of a model that the decoder lacks."""
    for key, value in file.metadata.items():
        if fate(key, architecture) == "refused" and not _is_neutral(key, value):
            raise GGUFError(f"{file.path}: expected a model without {key}, got {value!r:.60}")


def key_notes(file: GGUFFile, architecture: str) -> tuple[str, ...]:
    """One, if there are keys that ask for what is not done here, or that no list has."""
    noted = [
        f"{key} = {value!r:.60}"
        for key, value in file.metadata.items()
        if fate(key, architecture) in ("noted", None) and not _is_neutral(key, value)
    ]
    return (f"{file.path}: without effect here: {', '.join(noted)}",) if noted else ()


def fate(key: str, architecture: str) -> Fate | None:
    """What becomes of a key whose value is not neutral; None if no list has it."""
    return next((found for pattern, found in _PATTERNS[architecture] if pattern.fullmatch(key)), None)


def _is_neutral(key: str, value: Any) -> bool:
    """Whether the value says that there is nothing to do, as 0 and false do of most keys."""
    if isinstance(value, np.ndarray):
        return not value.any()
    values = _NEUTRAL.get(key.partition(".")[2])
    return not value if values is None else value in values


APPLIED = (
    "general.architecture general.alignment general.sampling.temp general.sampling.top_k general.sampling.top_p "
    "split.* {arch}.context_length {arch}.embedding_length {arch}.block_count {arch}.feed_forward_length "
    "{arch}.attention.head_count {arch}.attention.head_count_kv {arch}.attention.key_length "
    "{arch}.attention.value_length {arch}.attention.layer_norm_rms_epsilon {arch}.rope.dimension_count "
    "{arch}.rope.freq_base {arch}.rope.scale_linear {arch}.rope.scaling.type {arch}.rope.scaling.factor "
    "{arch}.rope.scaling.original_context_length {arch}.rope.scaling.yarn_beta_fast "
    "{arch}.rope.scaling.yarn_beta_slow "
    "gemma3.attention.sliding_window gemma3.attention.sliding_window_pattern gemma3.rope.freq_base_swa "
    "gemma3.final_logit_softcapping "
    "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.scores "
    "tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id "
    "tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id "
    "tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id tokenizer.ggml.fim_sep_token_id "
    "tokenizer.ggml.add_bos_token tokenizer.ggml.add_space_prefix tokenizer.chat_template"
)

# Of these llama.cpp's decoders make nothing either, or they are said again by the tensors' shapes.
_WITHOUT_EFFECT = (
    "{arch}.vocab_size {arch}.tensor_data_layout {arch}.attention.layer_norm_epsilon {arch}.rope.scaling.finetuned "
    "tokenizer.ggml.token_type_count tokenizer.ggml.seperator_token_id tokenizer.ggml.mask_token_id "
    "tokenizer.ggml.add_sep_token tokenizer.ggml.fim_*_token_id tokenizer.ggml.prefix_token_id "
    "tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id tokenizer.huggingface.json "
    "tokenizer.chat_templates tokenizer.chat_template.* imatrix.* quantize.*"
)

# These ask for something that an answer can do without.
_NOTED = (
    "general.sampling.* {arch}.pooling_type llama.attention.sliding_window llama.attention.sliding_window_pattern "
    "llama.rope.freq_base_swa tokenizer.ggml.add_eos_token tokenizer.ggml.remove_extra_whitespaces "
    "tokenizer.ggml.precompiled_charsmap tokenizer.rwkv.world"
)

# These are of other kinds of models.
_REFUSED = (
    "{arch}.attn_logit_softcapping llama.final_logit_softcapping {arch}.router_logit_softcapping {arch}.logit_scale "
    "{arch}.residual_scale {arch}.embedding_scale {arch}.expert* {arch}.moe_* {arch}.interleave_moe_layer_step "
    "{arch}.leading_dense_block_count {arch}.nextn_predict_layers {arch}.n_deepstack_layers "
    "{arch}.use_parallel_residual {arch}.embedding_length_* {arch}.features_length {arch}.decoder_* {arch}.swin_norm "
    "{arch}.rescale_every_n_layers {arch}.time_* {arch}.token_shift_count {arch}.full_attention_interval "
    "{arch}.activation_sparsity_scale {arch}.altup.* {arch}.swiglu_clamp_* {arch}.*_feat_in {arch}.*_feat_out "
    "{arch}.attention.max_alibi_bias {arch}.attention.clamp_kqv {arch}.attention.group_norm_* {arch}.attention.causal "
    "{arch}.attention.*_lora_rank {arch}.attention.relative_buckets_count {arch}.attention.*scale "
    "{arch}.attention.temperature_length {arch}.attention.*_mla {arch}.attention.*_swa {arch}.attention.indexer.* "
    "{arch}.attention.shared_kv_layers {arch}.rope.dimension_count_swa {arch}.rope.dimension_sections "
    "{arch}.rope.scaling.alpha {arch}.rope.scaling.*attn_factor {arch}.rope.scaling.yarn_log_multiplier "
    "{arch}.rope.scaling.yarn_ext_factor {arch}.ssm.* {arch}.kda.* {arch}.wkv.* {arch}.posnet.* {arch}.convnext.* "
    "{arch}.classifier.* {arch}.shortconv.* adapter.* clip.* diffusion.* xielu.*"
)

# What leaves a model as it is, by the key after the architecture; of all others 0, false and nothing do.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.output_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}


def _patterns(architecture: str) -> list[tuple[re.Pattern[str], Fate]]:
    lists: tuple[tuple[str, Fate], ...] = (
        (APPLIED, "applied"),
        (_WITHOUT_EFFECT, "without effect"),
        (_NOTED, "noted"),
        ("general.*", "without effect"),  # who made it, of what, under which licence
        (_REFUSED, "refused"),
    )
    return [
        (re.compile(re.escape(key.replace("{arch}", architecture)).replace(r"\*", ".*")), found)
        for keys, found in lists
        for key in keys.split()
    ]


_PATTERNS = {architecture: _patterns(architecture) for architecture in ARCHITECTURES}
