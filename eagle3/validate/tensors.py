"""Rules on the stored tensors."""

import torch

from eagle3.target import read_embedding_rows
from eagle3.terminal import UserError
from eagle3.validate.check import NAMES, Check
from eagle3.validate.stored import FLOATS

OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # each has a rule of its own
SAMPLED_BLOCKS, SAMPLED_ROWS = 8, 8  # of the embedding


def expected_shapes(check: Check) -> dict[str, tuple[int, ...]]:
    """Every tensor that vLLM's draft has with this config (vllm/model_executor/models/llama_eagle3.py).

    SGLang's is the same but for bias and the norm before fc, whose flags have findings of their own.
    """
    config = check.config
    width, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    query, key = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    fc = check.draft.tensors.get("fc.weight")
    states = fc.shape[-1] if fc else 3 * check.state_width  # the rule on the count of aux layers has judged it
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, states)}
    for layer in range(config["num_hidden_layers"]):
        entering = width if layer else 2 * width
        attention = {"q": (query, entering), "k": (key, entering), "v": (key, entering), "o": (width, query)}
        for part, shape in attention.items():
            shapes[f"layers.{layer}.self_attn.{part}_proj.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"layers.{layer}.self_attn.{part}_proj.bias"] = shape[:1]
        for part, shape in {"gate": (mlp, width), "up": (mlp, width), "down": (width, mlp)}.items():
            shapes[f"layers.{layer}.mlp.{part}_proj.weight"] = shape
            if config.get("mlp_bias"):
                shapes[f"layers.{layer}.mlp.{part}_proj.bias"] = shape[:1]
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{norm}.weight"] = (width,)
    if check.eagle.get("norm_before_fc", config.get("norm_before_fc")):
        shapes["input_norm.weight"] = (states,)
    if check.fc_norm:
        shapes |= {f"fc_norm.{place}.weight": (check.state_width,) for place in range(states // check.state_width)}
    return shapes | {
        "norm.weight": (width,),
        "lm_head.weight": (check.draft_vocab, width),
        "embed_tokens.weight": (check.target.vocab_size, width),
        "d2t": (check.draft_vocab,),
        "t2d": (check.target.vocab_size,),
    }


def names_and_shapes(check: Check) -> None:
    """No missing, no extra tensor, each of the right shape."""
    tensors, expected = check.draft.tensors, expected_shapes(check)
    prefixed = check.draft.prefixed
    if not check.vllm:  # srt/models/llama_eagle3.py load_weights takes both forms, but for the head
        prefixed = [name for name in prefixed if name == "model.lm_head.weight"]
    if prefixed:  # vllm/model_executor/models/llama_eagle3.py load_weights puts model. before every name
        check.error("prefix", f"{len(prefixed)} names such as {prefixed[0]}; write them without model.")
    old = sorted(stored.name for stored in tensors.values() if "aux_norm_" in stored.name)
    if check.vllm and old:  # srt/models/llama_eagle3.py load_weights alone renames them
        check.error("fc-norm", f"{len(old)} names such as {old[0]} that SGLang alone knows; write fc_norm.0 and so on")
    extra = sorted(tensors.keys() - expected.keys())
    if norms := [name for name in extra if name.startswith("fc_norm.")]:
        # vLLM raises, SGLang skips them and hands fc what it was not trained on
        count = sum(name.startswith("fc_norm.") for name in expected)
        check.error(
            "fc-norm",
            f"{_some(norms)} beside the {count} norms before fc that config.json describes; write fc_norm true if it "
            "was trained so, with one for each aux layer, else remove them",
        )
        extra = [name for name in extra if name not in norms]
    if extra:
        # AutoWeightsLoader in vllm/model_executor/models/utils.py raises, srt/models/llama_eagle3.py skips
        effect = "vLLM refuses them" if check.vllm else "SGLang skips them silently"
        check.add(
            check.vllm, "extra-tensor", f"{len(extra)} tensors that are not read ({_some(extra)}): {effect}; remove"
        )
    if missing := sorted(expected.keys() - tensors.keys() - set(OPTIONAL)):
        # neither loader looks for parameters that stayed as they were allocated
        check.error("missing-tensor", f"{len(missing)} tensors are missing ({_some(missing)}); export again")
    if "lm_head.weight" not in tensors:
        _no_head(check)
    for name in sorted(tensors.keys() & expected.keys()):
        if tensors[name].shape != expected[name]:
            attention = ".self_attn." in name
            why = " of heads, head_dim and twice the hidden size" if attention else ""
            check.error(
                "qkv-width" if attention else "shape",
                f"{name} is {list(tensors[name].shape)}, expected {list(expected[name])}{why}; correct config.json or "
                "export again",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")


def _no_head(check: Check) -> None:
    for server in check.servers:
        # the target's own head: vllm/v1/spec_decode/llm_base_proposer.py _maybe_share_lm_head; in
        # srt/models/llama_eagle3.py load_lm_head_from_target only where draft_vocab_size is null
        null = check.config.get("draft_vocab_size") is None
        if check.draft_vocab != check.target.vocab_size or (server == "sglang" and not null):
            text = (
                f"no lm_head.weight for {check.draft_vocab} draft ids: {NAMES[server]} drafts with another; export it"
            )
            check.error("lm-head", text)


def vocabulary(check: Check) -> None:
    """The map from draft ids to target ids."""
    d2t, t2d = (check.draft.tensors.get(name) for name in ("d2t", "t2d"))
    draft_size, vocab_size = check.draft_vocab, check.target.vocab_size
    if draft_size >= vocab_size:
        if d2t or t2d:
            # vllm/model_executor/models/llama_eagle3.py has no draft_id_to_target_id then, and refuses d2t
            text = f"a map with a full vocabulary of {vocab_size}: vLLM refuses d2t; remove d2t and t2d"
            check.add(check.vllm and d2t is not None, "d2t-full", text)
        return
    if not d2t:
        # both servers then take draft ids for target ids
        check.error("d2t-missing", f"no d2t for {draft_size} draft ids of {vocab_size}; export int64 offsets")
        return
    if d2t.dtype not in ("I64", "I32"):
        check.error("d2t-type", f"d2t is {d2t.dtype}; bf16 rounds ids above 256, export int64")
        return
    if d2t.dtype == "I32":  # copy_ into int64 in vLLM, a sum with int64 in SGLang
        check.warning("d2t-type", "d2t is I32, which both servers widen; write int64")
    if not t2d:
        check.warning("t2d-missing", "no t2d, which servers do not read but training tools do; export it")
    elif t2d.dtype != "BOOL":
        check.warning("t2d-type", f"t2d is {t2d.dtype}, which training tools expect as BOOL; export bool")
    if d2t.shape != (draft_size,) or (t2d and t2d.shape != (vocab_size,)):
        return  # has a finding
    offsets, marked = d2t.read().long(), t2d.read().bool() if t2d else None

    def fits(ids: torch.Tensor) -> bool:
        """Whether these are distinct target ids, and those that t2d marks."""
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != draft_size:
            return False
        return marked is None or (int(marked.sum()) == draft_size and bool(marked[ids].all()))

    ids = torch.arange(draft_size) + offsets
    if fits(ids):
        if not bool((ids[1:] > ids[:-1]).all()):
            check.warning("d2t-order", "target ids of d2t do not ascend; servers take any order, other tools may not")
    elif fits(offsets):
        check.error(
            "d2t-absolute", f"d2t holds target ids (the last {offsets[-1]}), not offsets; subtract 0, 1, 2, ..."
        )
    elif outside := int(((ids < 0) | (ids >= vocab_size)).sum()):
        check.error("d2t-ids", f"{outside} target ids of d2t lie outside 0 to {vocab_size - 1}; make the map again")
    elif twice := draft_size - ids.unique().numel():
        check.error("d2t-ids", f"{twice} target ids of d2t occur twice; make the map again")
    else:
        both = int(marked[ids].sum())
        check.error(
            "t2d-disagrees",
            f"t2d marks {int(marked.sum())} ids, d2t has {draft_size}, {both} are in both; make the map again",
        )


def values(check: Check) -> None:
    """No NaN, no infinity, no matrix of zeros."""
    for name, stored in check.draft.tensors.items():
        if stored.dtype not in FLOATS or 0 in stored.shape:
            continue
        low, high = (float(end) for end in torch.aminmax(stored.read()))  # NaN where there is one
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            check.error("not-finite", f"{name} holds NaN or infinity; export an earlier checkpoint")
        elif low == high == 0:
            check.error("all-zero", f"{name} is all zero, so it was never written; export again")


def embedding(check: Check) -> None:
    """SGLang always takes the target's embedding where widths agree, vLLM where there is none or the same one."""
    stored, target, width = check.draft.tensors.get("embed_tokens.weight"), check.target, check.config["hidden_size"]
    if width != target.hidden_size:
        # srt/models/llama.py set_embed, vllm/v1/spec_decode/llm_base_proposer.py _maybe_share_embeddings
        if not stored:
            text = f"no embed_tokens.weight, and the target's has width {target.hidden_size}, not {width}; export it"
            check.error("embed-missing", text)
        return
    if not stored:
        if check.vllm:  # _maybe_share_embeddings again
            check.warning(
                "embed-missing", "no embed_tokens.weight: vLLM shares the target's, not with pipeline parallelism"
            )
        return
    if stored.shape != (target.vocab_size, width):
        return  # has a finding
    starts = [place * (target.vocab_size - SAMPLED_ROWS) // (SAMPLED_BLOCKS - 1) for place in range(SAMPLED_BLOCKS)]
    try:
        theirs = read_embedding_rows(target, starts, SAMPLED_ROWS)
    except UserError as error:
        check.warning("embed-unchecked", f"embed_tokens was not compared with the target's: {error}")
        return
    mine = torch.cat([stored.rows(start, start + SAMPLED_ROWS) for start in starts])
    if differing := int((mine != theirs.to(mine.dtype)).any(1).sum()):
        text = f"{differing} of {len(mine)} rows looked at in embed_tokens are not the target's"
        # srt/speculative/eagle_worker_v2.py init_lm_head
        effect = "SGLang takes the target's; train with those, frozen" if check.sglang else "vLLM keeps these"
        check.add(check.sglang, "embed-rows", f"{text}: {effect}")
