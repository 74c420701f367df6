"""Rules on config.json but for the layer ids."""

import json
from typing import Any

from eagle3.draft.config import DROPPED_ROPE_KEYS
from eagle3.validate.check import NAMES, Check
from eagle3.validate.stored import FLOATS, IDS

# vllm/model_executor/models/registry.py: names whose class is llama_eagle3.Eagle3LlamaForCausalLM;
# srt/models/llama_eagle3.py: EntryClass
ARCHITECTURES = {
    "vllm": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
    "sglang": ("LlamaForCausalLMEagle3",),
}
ROPE_FORMS = ("rope_scaling", "rope_parameters")

# A value of another kind is computed with, or refused by transformers' strict config classes
REQUIRED = "hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
REQUIRED += ["vocab_size", "max_position_embeddings"]
FLAGS = "tie_word_embeddings attention_bias mlp_bias norm_before_residual norm_before_fc fc_norm use_aux_norm".split()
FLAGS += ["norm_output", "use_cache"]
KINDS: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((int,), (*REQUIRED, "target_hidden_size")),
    ((int, type(None)), ("num_key_value_heads", "head_dim", "draft_vocab_size", "num_aux_hidden_states")),
    ((int, float), ("rms_norm_eps",)),
    ((int, float, type(None)), ("rope_theta",)),
    ((bool,), tuple(FLAGS)),
    ((str, type(None)), ("model_type", "hidden_act", "dtype", "torch_dtype")),
    ((dict, type(None)), (*ROPE_FORMS, "eagle_config", "quantization_config")),
    ((list, type(None)), ("architectures",)),
)


def kinds(check: Check) -> bool:
    """Every value has the JSON type that readers expect. Returns whether that is so."""
    config = check.config
    if check.draft.not_finite:
        check.error(
            "config-type", f"config.json holds {', '.join(check.draft.not_finite)}, which is not JSON; correct it"
        )
    for types, keys in KINDS:
        for key in keys:
            if key not in config:
                if key in REQUIRED:
                    check.error("config-type", f"config.json has no {key}, readers take a Llama's default; write it")
            elif type(config[key]) not in types or (int in types and config[key] is not None and config[key] <= 0):
                wanted = "a positive number" if int in types else types[0].__name__
                check.error("config-type", f"config.json: {key} is {json.dumps(config[key])}, expected {wanted}")
    holders = [("", config), *((f"{key}.", config.get(key)) for key in ("eagle_config", *ROPE_FORMS))]
    for where, holder in holders:
        if not isinstance(holder, dict):
            continue
        ids = holder.get(IDS)
        if ids is not None and (not isinstance(ids, list) or any(type(layer) is not int for layer in ids)):
            check.error("config-type", f"config.json: {where}{IDS} is {json.dumps(ids)}, expected integers")
        for key, value in holder.items() if where[:-1] in ROPE_FORMS else ():
            if isinstance(value, str) and key not in ("type", "rope_type"):
                check.error("config-type", f'config.json: {where}{key} is "{value}", expected a number')
    return not check.found or check.found[-1].code != "config-type"


def described(check: Check) -> None:
    """Names, sizes, flags and types."""
    config, target = check.config, check.target
    _architecture(check)
    if config["vocab_size"] != target.vocab_size:
        # vllm/model_executor/models/llama_eagle3.py compute_logits scatters into that many columns
        check.error(
            "vocab-size",
            f"vocab_size is {config['vocab_size']}, the target's is {target.vocab_size}; write that, and the draft's "
            "own into draft_vocab_size",
        )
    if check.draft_vocab > target.vocab_size:
        check.error(
            "draft-vocab",
            f"draft_vocab_size {check.draft_vocab} exceeds the target's vocab_size {target.vocab_size}; correct it",
        )
    if check.sglang and "draft_vocab_size" not in config:
        # srt/models/llama_eagle3.py reads config.draft_vocab_size; vLLM takes vocab_size where it is absent
        check.error("draft-vocab", "no draft_vocab_size, without which SGLang stops; write it")
    if check.state_width != target.hidden_size:
        check.error(
            "hidden-size",
            f"the draft takes states of width {check.state_width}, the target's are {target.hidden_size}; take a draft "
            "of this target, or set target_hidden_size",
        )
    if check.sglang and config.get("tie_word_embeddings"):
        # srt/models/llama_eagle3.py: lm_head = embed_tokens, and the stored head is skipped.
        # vLLM unties where there is a stored one: vllm/config/model.py maybe_untie_word_embeddings
        check.error("tied", "tie_word_embeddings is true: SGLang takes the embedding for the head; write false")
    if config.get("quantization_config"):
        # vllm/model_executor/models/utils.py get_draft_quant_config; srt/configs/model_config.py _parse_quant_hf_config
        method = config["quantization_config"].get("quant_method")
        check.error("quantization", f"quantization_config ({method}) as if the draft were quantised; remove it")
    _positions(check)
    _norms_and_bias(check)
    if not check.draft.speculators:
        _dtype(check)


def _architecture(check: Check) -> None:
    names = [str(name) for name in check.config.get("architectures") or []]
    for server in check.servers:
        served = names
        if server == "vllm":  # vllm/transformers_utils/configs/eagle.py
            served = [
                name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}" for name in names
            ]
        if not set(served) & set(ARCHITECTURES[server]) or not check.config.get("model_type"):
            check.error(
                "architecture",
                f"architectures {names}, model_type {check.config.get('model_type')!r}: not a Llama-type EAGLE-3 draft "
                f"for {NAMES[server]}; write LlamaForCausalLMEagle3 and llama if it is one",
            )


def _positions(check: Check) -> None:
    have, need = check.config["max_position_embeddings"], check.target.max_positions
    if have >= need:
        return
    text = f"max_position_embeddings is {have}, the target's {need}"
    if check.sglang:
        # srt/speculative/eagle_worker_v2.py gives the draft the target's context length, and
        # srt/configs/model_config.py _derive_context_length refuses one longer than the draft's
        check.error("positions", f"{text}: SGLang does not start without a --context-length of {have}; write {need}")
    else:
        # vllm/config/speculative.py _maybe_override_draft_max_position_embeddings
        check.warning("positions", f"{text}: vLLM 0.32 raises it, older ones read past their table; write {need}")


def _norms_and_bias(check: Check) -> None:
    aux = check.eagle.get("use_aux_hidden_state")
    if aux is False:
        check.error(
            "use-aux", "eagle_config.use_aux_hidden_state is false: servers pass one state and no fc; write true"
        )
    elif check.sglang and check.eagle and aux is None:
        # srt/speculative/eagle_utils.py get_draft_hidden_dim takes false, srt/model_executor/model_runner.py true
        check.warning(
            "use-aux", "eagle_config has no use_aux_hidden_state, for which SGLang has two defaults; write true"
        )
    # srt/models/llama_eagle3.py: the residual is the state before the norm, fc has no norm over all, q/k/v no bias
    for key in ("norm_before_residual", "norm_before_fc", "attention_bias"):
        if check.sglang and (check.config.get(key) or check.eagle.get(key)):
            check.error(key.replace("_", "-"), f"{key} is true, which SGLang does not know; train without it")
    for key in ("fc_norm", "norm_output"):  # llama_eagle3.py of vllm and srt take them from the config itself
        if check.eagle.get(key) and not check.config.get(key):
            check.error(
                key.replace("_", "-"), f"{key} is true only inside eagle_config, where no server looks; move it out"
            )
    if check.vllm and check.config.get("use_aux_norm") and not check.config.get("fc_norm"):
        check.error("fc-norm", "use_aux_norm is true, a name that SGLang alone knows; write fc_norm true")


def _dtype(check: Check) -> None:
    """vLLM runs the draft in the target's dtype: vllm/config/speculative.py, dtype=self.target_model_config.dtype."""
    stated = {key: check.config[key] for key in ("dtype", "torch_dtype") if check.config.get(key)}
    if not stated:
        # srt/configs/model_config.py _get_and_verify_dtype: nothing is float32, and float32 becomes float16
        check.add(check.sglang, "dtype", "no dtype, no torch_dtype: SGLang runs the draft in float16; write both")
        return
    if len(set(stated.values())) > 1:
        check.error("dtype", f"dtype is {stated['dtype']}, torch_dtype {stated['torch_dtype']}; write what is stored")
        return
    for key in {"dtype", "torch_dtype"} - stated.keys():
        check.warning("dtype", f"no {key}: transformers 5 knows both names, older and newer readers one; write both")
    weights = [stored for name, stored in check.draft.tensors.items() if name not in ("d2t", "t2d")]
    kinds = sorted({FLOATS[stored.dtype] for stored in weights if stored.dtype in FLOATS})
    value = next(iter(stated.values()))
    if kinds and kinds != [value]:
        text = f"dtype is {value}, the tensors are {' and '.join(kinds)}; write what is stored"
        check.add(check.sglang, "dtype-stored", text)


def rope(check: Check) -> None:
    """Both servers read transformers' rope_parameters; readers before transformers 5 rope_theta and rope_scaling."""
    config = check.config
    theta, scaling, parameters = (config.get(key) for key in ("rope_theta", *ROPE_FORMS))
    # transformers/modeling_rope_utils.py convert_rope_params_to_dict: rope_scaling wins over rope_parameters; a theta
    # inside wins over the one at top level; 10000 where there is none
    used = (scaling or parameters or {}).get("rope_theta") or theta
    of_target = check.target.config
    wanted = (of_target.get("rope_parameters") or {}).get("rope_theta") or of_target.get("rope_theta")
    if not used:
        check.error(
            "rope-theta",
            f"no rope_theta where servers look: they take 10000, the target has {wanted}; write it at top level and "
            "into rope_parameters",
        )
        return
    if wanted and used != wanted:
        check.warning("rope-target", f"rope theta is {used}, the target's {wanted}; right only if it was trained so")
    old, new = _plain(scaling), _plain(parameters)
    thetas = [rope.get("rope_theta") for rope in (config, scaling or {}, parameters or {})]
    conflict = old != new or len({value for value in thetas if value}) > 1
    if parameters and (theta or scaling) and (conflict or not thetas[2]):
        text = (
            f"theta {theta} and rope_scaling {old}, but rope_parameters with theta {thetas[2]} {new}; make them equal"
        )
        check.add(conflict, "rope-forms", text)  # transformers 5 fills in a theta that is missing there
    if parameters and not theta and not check.draft.speculators:
        check.warning("rope-old-form", "no rope_theta at top level, where readers before transformers 5 look; write it")
    # srt/layers/rotary_embedding/factory.py drops these keys, and yarn.py scales by 0.1 ln(factor) + 1 all the same;
    # vllm/model_executor/layers/rotary_embedding and transformers honour them
    keys = {*(scaling or {}), *(parameters or {})}
    if check.sglang and (kept := sorted(keys & {*DROPPED_ROPE_KEYS, "attention_factor"})):
        check.error("mscale", f"rope has {', '.join(kept)}: vLLM honours that, SGLang does not; train without")


def _plain(rope: dict[str, Any] | None) -> dict[str, Any]:
    """A rope dict without theta and under one name for its type, for comparison."""
    rope = {key: value for key, value in (rope or {}).items() if key != "rope_theta" and value is not None}
    kind = rope.pop("type", "default")
    return {"rope_type": kind} | rope
