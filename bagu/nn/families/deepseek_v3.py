"""DeepSeek-V3: multi-head latent attention, and experts in groups, balanced by a bias that affects only the choice.

Files have an extra layer after the last one, which predicts a second token; it is skipped, as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from bagu.machine.hub import WeightsError
from bagu.nn.config import MLAConfig, ModelConfig, MoEConfig
from bagu.nn.families.core import Rule, gate_up
from bagu.nn.families.decoder import DECODER, DENSE, EXPERTS, decoder, read_decoder, write_decoder
from bagu.nn.families.keys import SIZE, UNUSED, Key, Only, Read, Required, refuse_value
from bagu.nn.families.rope import read_rope

LATENT = (
    Rule("blocks.{layer}.attention.q_a.weight", "model.layers.{layer}.self_attn.q_a_proj.weight"),
    Rule("blocks.{layer}.attention.q_norm.weight", "model.layers.{layer}.self_attn.q_a_layernorm.weight"),
    Rule("blocks.{layer}.attention.q_b.weight", "model.layers.{layer}.self_attn.q_b_proj.weight"),
    Rule("blocks.{layer}.attention.q.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    Rule("blocks.{layer}.attention.kv_a.weight", "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"),
    Rule("blocks.{layer}.attention.kv_norm.weight", "model.layers.{layer}.self_attn.kv_a_layernorm.weight"),
    Rule("blocks.{layer}.attention.kv_b.weight", "model.layers.{layer}.self_attn.kv_b_proj.weight"),
)
SHARED = (
    Rule("blocks.{layer}.ffn.bias", "model.layers.{layer}.mlp.gate.e_score_correction_bias"),
    Rule(
        "blocks.{layer}.ffn.shared.gate_up.weight",
        (
            "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
            "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
        ),
        gate_up,
    ),
    Rule("blocks.{layer}.ffn.shared.down.weight", "model.layers.{layer}.mlp.shared_experts.down_proj.weight"),
)
SWITCHES = {"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
KEYS: dict[str, Key] = {
    **DECODER,
    **{name: Only(value) for name, value in SWITCHES.items()},
    "num_key_value_heads": Read(int | None, 128, least=1),
    "head_dim": Read(int, None, least=1),
    "rope_interleave": Read(bool | None, True),
    "q_lora_rank": Required(int | None, least=1),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE),
    **dict.fromkeys(
        ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"), SIZE
    ),
    "n_shared_experts": SIZE,  # with 0 transformers keeps empty tensors
    "first_k_dense_replace": Required(int, least=0),
    "norm_topk_prob": Required(bool),
    "routed_scaling_factor": Required(float),
    "qk_head_dim": UNUSED,  # the sum of two others
    # the layers after the last one, which predict further tokens
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), UNUSED),
    # training options, and the distribution of weights over machines
    **dict.fromkeys(("aux_loss_alpha", "ep_size", "output_router_logits", "pretraining_tp", "seq_aux"), UNUSED),
}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    heads, rope_dim = hf["num_attention_heads"], hf["qk_rope_head_dim"]
    for name, wanted, same_as in (
        ("num_key_value_heads", heads, "num_attention_heads"),
        ("head_dim", rope_dim, "qk_rope_head_dim"),
    ):
        if hf[name] not in (None, wanted):  # the default of the first is 128, for any number of heads
            refuse_value("config.json", name, hf[name], f"{wanted}, which is {same_as}")
    mla = MLAConfig(
        q_rank=hf["q_lora_rank"],
        kv_rank=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=rope_dim,
        v_dim=hf["v_head_dim"],
        eps=1e-6,  # the norms of the latents do not use rms_norm_eps
    )
    moe = MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        expert_size=hf["moe_intermediate_size"],
        num_shared=hf["n_shared_experts"],
        dense_layers=tuple(range(min(hf["first_k_dense_replace"], hf["num_hidden_layers"]))),
        scoring="sigmoid",
        normalize_top_k=hf["norm_topk_prob"],
        route_scale=float(hf["routed_scaling_factor"]),
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
        bias_rate=0.001,  # the paper's value for most of its training: https://arxiv.org/abs/2412.19437, 4.2
    )
    fields = read_decoder(hf) | {
        "num_kv_heads": heads,
        "head_dim": mla.nope_dim + mla.rope_dim,
        "positions": read_rope(hf, "interleaved" if hf["rope_interleave"] else "half"),
    }
    return ModelConfig(**fields, mla=mla, moe=moe)


def write(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    if mla is None or moe is None:
        raise WeightsError("the model has no MLA, or no mixture of experts", hint="")
    return write_decoder(config) | {
        "head_dim": mla.rope_dim,  # transformers' RoPE reads the size under this name
        "rope_interleave": getattr(config.positions, "layout", None) == "interleaved",
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.num_shared,
        "first_k_dense_replace": len(moe.dense_layers),
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "num_nextn_predict_layers": 0,
        **SWITCHES,
    }


DEEPSEEK_V3 = decoder(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForSequenceClassification",
    read,
    write,
    (*LATENT, *DENSE, *EXPERTS, *SHARED),
    keys=KEYS,
    aliases={"num_local_experts": "n_routed_experts"},
    unused=(r"model\.layers\.{num_layers}\..*",),
)
