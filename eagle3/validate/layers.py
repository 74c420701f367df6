"""Rules on the aux layers: which states each server hands to the draft, and how many.

Ids here are vLLM's (id i is what enters layer i) but for those inside eagle_config, which SGLang reads.
"""

from eagle3.export import SGLANG_UNSHIFTED
from eagle3.target import Target
from eagle3.validate.check import Check
from eagle3.validate.stored import IDS


def layer_ids(check: Check) -> None:
    target = check.target
    top, nested = check.config.get(IDS), check.eagle.get(IDS)
    unshifted = target.model_type in SGLANG_UNSHIFTED
    default = [2, target.num_layers // 2, target.num_layers - 3]  # of both servers, where they find no ids
    captured = captured_by_sglang(nested, target) if nested else None
    sound = [_sound(check, IDS, top), _sound(check, f"what SGLang makes of eagle_config's {nested}", captured)]
    if not all(sound):
        return
    if not top and not nested:
        check.warning("layer-ids-missing", f"no {IDS}: servers assume {default}; right only if it was trained so")
    elif not top and check.vllm:
        # vllm/v1/worker/gpu_model_runner.py takes eagle_config's as its own; vLLM's V2 runner takes its default:
        # vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py
        check.add(
            not nested == captured == default,
            "layer-ids-place",
            f"ids {nested} only inside eagle_config: SGLang captures {captured}, vLLM {nested} or {default}; write "
            f"{captured} at top level",
        )
    elif not nested and check.sglang:
        # srt/model_executor/model_runner.py reads eagle_config alone
        wanted = top if unshifted else [layer - 1 for layer in top]
        check.add(
            top != default,
            "layer-ids-place",
            f"ids {top} only at top level: SGLang captures {default}; write {wanted} into eagle_config",
        )
    if nested and unshifted and nested[0] == 1 and check.sglang:
        check.add(
            bool(top) and top != captured,
            "layer-ids-first",
            f"eagle_config's ids {nested} start at 1: SGLang 0.5.14 captures {captured}, other versions {nested}; "
            "train with ids from 2 on",
        )
    elif top and nested and captured != top:
        text = (
            f"the top level's ids make vLLM capture {top}, eagle_config's {nested} make SGLang capture {captured}; for "
            f"{target.model_type} eagle_config holds {'the same ids' if unshifted else 'ids one less'}"
        )
        check.add(check.vllm and check.sglang, "layer-ids-convention", text)
    elif check.vllm and top == [layer - 1 for layer in default]:
        text = f"ids {top} at top level look like SGLang's of {default}; if it was trained on those, write them"
        check.warning("layer-ids-convention", text)
    elif check.sglang and not top and nested == default and not unshifted:
        text = (
            f"eagle_config's ids {nested} look like vLLM's: SGLang captures {captured}; write one less if that is wrong"
        )
        check.warning("layer-ids-convention", text)
    _count(check, top or captured)


def captured_by_sglang(nested: list[int], target: Target) -> list[int]:
    """The layers that SGLang makes of the ids inside eagle_config."""
    # srt/models/llama.py and others add one; srt/models/deepseek_v2.py only if the first is 1
    unshifted = target.model_type in SGLANG_UNSHIFTED and nested[0] != 1
    return list(nested) if unshifted else [layer + 1 for layer in nested]


def _sound(check: Check, name: str, ids: list[int] | None) -> bool:
    """Whether servers capture the ids as they are listed."""
    if not ids:
        return True
    count = check.target.num_layers
    # both capture in the order of the layers; vllm/model_executor/models/interfaces.py sorts and makes ids unique
    if min(ids) < 1 or max(ids) >= count:
        text = f"{name} is {ids}, expected 1 to {count - 1}: 0 is the embedding, {count} the end, which SGLang has not"
        check.error("layer-ids-range", text)
    elif len(set(ids)) != len(ids):
        check.error("layer-ids-twice", f"{name} is {ids}: servers capture an id once; correct it")
    elif ids != sorted(ids):
        check.error("layer-ids-order", f"{name} is {ids}: servers capture in ascending order; retrain so, or sort them")
    else:
        return True
    return False


def _count(check: Check, ids: list[int] | None) -> None:
    # llama_eagle3.py of vllm and srt: num_aux_hidden_states, else the length of eagle_config's list, else 3
    stated = check.config.get("num_aux_hidden_states")
    served = stated or len(check.eagle.get(IDS) or ()) or 3
    count = len(ids) if ids else served
    if served != count:
        check.error("num-aux", f"{count} layer ids, servers count {served}; write num_aux_hidden_states {count}")
    elif not stated and count != 3:
        check.warning("num-aux", f"{count} layer ids and no num_aux_hidden_states: older servers assume 3; write it")
    if check.sglang and count == 1:
        # srt/models/llama_eagle3.py forward applies fc only where the width differs from the draft's
        check.error("aux-count", "one aux layer: SGLang skips fc then; train with three")
    elif check.sglang and count != 3:
        # srt/speculative/eagle_info.py hidden_size_for looks for the count in the target's config
        check.warning(
            "aux-count", f"{count} aux layers: SGLang 0.5.14 sizes its draft-extend buffers for three; try it"
        )
    fc = check.draft.tensors.get("fc.weight")
    width = count * check.state_width
    if fc and fc.shape[-1:] != (width,):
        check.error(
            "fc-width",
            f"fc.weight is {list(fc.shape)}, {count} states of {check.state_width} are {width}; correct the ids",
        )
