"""The meaning of the keys of a config.json. Each family has a table with one entry for every key it accepts:

    Required(type)         the family's reader uses the value; a file without the key is refused
    Read(type, default)    the reader uses the value; `default` is transformers' own for a file without the key
    Only(value, …)         an option of which bagu supports these values; any other is refused
    UNUSED                 the key does not affect the logits of a model in eval mode

A key that is not in the table is refused with its name, because transformers sets unknown keys as attributes of its
config object and model code reads some of them: `"is_causal": false` makes a Llama bidirectional.

The version of transformers that wrote the file (`transformers_version`) is ignored. For every key in these tables 4.57
and 5.22 have the same default, and both write every key of the model's own class, so a default only matters for files
written by hand or by other tools. RoPE has two layouts, `rope_theta` with `rope_scaling` (4.x) and `rope_parameters`
(5.x); both are read, and if both are present the precedence is that of 5.x. If the two versions read the same file
differently, the file is refused (rope.py lists the cases).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from bagu.machine.hub import WeightsError


@dataclass(frozen=True)
class Required:
    type: Any  # int, float, bool, str, list, dict, or a union with None; an int is accepted as a float
    least: int | None = None
    above: float | None = None


@dataclass(frozen=True)
class Read:
    type: Any
    default: Any
    least: int | None = None
    above: float | None = None


class Only:
    """The accepted values. A file without the key has the first value, as in transformers."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclass(frozen=True)
class Unused:
    pass


Key = Required | Read | Only | Unused
Keys = Mapping[str, Key]
UNUSED = Unused()
SIZE = Required(int, least=1)
DROPOUT = Read(float, 0.1, least=0)
INIT_STD = Read(float, 0.02, above=0)

GENERATION = (  # defaults of generate(), which older versions wrote to config.json
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "target_lookbehind",
    "temperature", "top_k", "top_p", "typical_p", "use_cache",
)  # fmt: skip
DESCRIPTION = (  # origin of the file, tokens and labels, outputs of a forward, training options
    "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "_num_labels",
    "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward", "cls_token_id",
    "cross_attention_hidden_size", "decoder_start_token_id", "dtype", "eos_token_id", "experts_implementation",
    "finetuning_task", "gradient_checkpointing", "id2label", "label2id", "mask_token_id", "model_type", "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "prefix", "problem_type",
    "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
    "tie_last_hidden_states", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
)  # fmt: skip
# keys that a file of any family may have: those of transformers' base class, 4.x and 5.x, and of related tools
SHARED: dict[str, Key] = {
    **dict.fromkeys((*GENERATION, *DESCRIPTION), UNUSED),
    "add_cross_attention": Only(False),
    "is_encoder_decoder": Only(False),
    "pruned_heads": Only(None, {}),
    "quantization_config": UNUSED,  # weights.py dequantizes the weights
}


def resolve(owner: str, given: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The value of every key that the reader uses, defaults included. `owner` starts the error message."""
    if unknown := sorted(given.keys() - keys.keys()):
        names = ", ".join(map(repr, unknown))
        raise WeightsError(
            f"{owner} has {names}, which bagu does not support",
            hint="such a key can change the model's output; if this one does not, remove it from the file",
        )
    values: dict[str, Any] = {}
    for name, key in keys.items():
        match key:
            case Only() if name in given and given[name] not in key.values:
                refuse_value(owner, name, given[name], " or ".join(map(repr, key.values)))
            case Required() if name not in given:
                raise WeightsError(f"{owner} has no {name!r}", hint="download or write it again")
            case Read() if name not in given:
                values[name] = key.default
            case Required() | Read():
                values[name] = _checked(owner, name, given[name], key)
    return values


def refuse_value(owner: str, name: str, value: Any, allowed: str) -> NoReturn:
    raise WeightsError(
        f"{owner} has {name} = {value!r}, but bagu supports only {allowed}",
        hint="the model would load but compute something else",
    )


def _checked(owner: str, name: str, value: Any, key: Required | Read) -> Any:
    """The value, or an error if its type or range is wrong."""
    types = set(get_args(key.type) or (key.type,))
    if float in types:
        types.add(int)
    if type(value) not in types or (isinstance(value, float) and not math.isfinite(value)):
        refuse_value(owner, name, value, f"values of type {getattr(key.type, '__name__', key.type)}")
    if value is not None and key.least is not None and value < key.least:
        refuse_value(owner, name, value, f"values of {key.least} or more")
    if value is not None and key.above is not None and value <= key.above:
        refuse_value(owner, name, value, f"values above {key.above:g}")
    return value
