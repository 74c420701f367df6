"""Capture with transformers: one prompt a forward pass, hooks on the decoder. Needs no vLLM; slower on a GPU."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from eagle3 import artifacts
from eagle3.capture.interface import EngineSettings, Fault, Sample, Scored, Written
from eagle3.capture.payload import Payload, fill, write
from eagle3.terminal import UserError, is_out_of_memory, output_to, short

WRITERS = 4  # threads that check and write: the copy is memory bound, the rest waits for the disk


class TransformersEngine:
    name = "transformers"

    def __init__(self, settings: EngineSettings) -> None:
        import transformers

        self.version = transformers.__version__
        self._settings = settings
        with output_to(settings.log, "loading the target"):
            self._model = _load(settings)
        self._decoder = _find_decoder(self._model, settings)
        self._seen: dict[int, torch.Tensor] = {}  # layer id -> [T, H] of the running forward pass
        for layer in settings.layout.layers[:-1]:
            self._watch(self._decoder.layers[layer], layer)
        # hidden_states[N] of transformers is already normed: take what enters the norm
        self._watch(self._decoder.norm, settings.layout.layers[-1])

    def _watch(self, module: torch.nn.Module, layer: int) -> None:
        def keep(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._seen[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        module.register_forward_pre_hook(keep, with_kwargs=True)

    def capture(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Written | Fault]]:
        writing: deque[tuple[Sample, Future]] = deque()  # oldest first
        with ThreadPoolExecutor(WRITERS) as pool:
            for sample in samples:
                layout = self._settings.layout
                payload = Payload(layout, sample.input_ids, sample.loss_mask, pinned=False)
                self._forward(self._decoder, sample.input_ids.tolist())
                if fault := fill(layout, [(payload, len(payload))], self._states()):
                    yield sample, fault
                    continue
                path = artifacts.sample_path(self._settings.output_dir, sample.index)
                writing.append((sample, pool.submit(write, path, payload)))
                while writing and (writing[0][1].done() or _tokens(writing) > self._settings.batch_tokens):
                    yield _settled(writing)
            while writing:
                yield _settled(writing)

    def score(self, prompts: list[list[int]], k: int) -> list[Scored | Fault]:
        scored: list[Scored | Fault] = []
        for prompt in prompts:
            logits = self._forward(self._model, prompt).logits[0, :-1].float()  # [T-1, V]
            top = logits.log_softmax(-1).topk(k)
            scored.append(Scored(self._states().cpu(), top.indices.cpu(), top.values.cpu()))
        return scored

    def close(self) -> None:
        del self._model, self._decoder
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _states(self) -> torch.Tensor:
        """[T, L, H] of the last forward pass, layers ascending, on one device (device_map may spread the layers)."""
        states = [self._seen.pop(layer) for layer in self._settings.layout.layers]
        return torch.stack([one.to(states[-1].device) for one in states], dim=1)

    @torch.inference_mode()
    def _forward(self, module: torch.nn.Module, prompt: list[int]) -> Any:
        # device_map may have put the first layers on any GPU
        ids = torch.tensor([prompt], device=self._model.get_input_embeddings().weight.device)  # [1, T]
        try:
            return module(input_ids=ids, use_cache=False)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"a prompt of {len(prompt)} tokens does not fit in memory beside the target ({short(error)}); "
                "use --engine vllm, or shorter samples (--max-seq-len of stage 01)"
            ) from error


def _settled(writing: deque[tuple[Sample, Future]]) -> tuple[Sample, Written | Fault]:
    """Wait for the oldest write. Raises what the disk raised."""
    sample, future = writing.popleft()
    return sample, future.result()


def _tokens(writing: deque[tuple[Sample, Future]]) -> int:
    return sum(len(sample.input_ids) for sample, _ in writing)


def _load(settings: EngineSettings) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

    directory = settings.target.directory
    try:
        # remote code for the config or tokenizer alone (Kimi) must not hide transformers' own model class
        auto_map = PreTrainedConfig.get_config_dict(directory)[0].get("auto_map", {})
        remote = settings.trust_remote_code and any(name.startswith("AutoModel") for name in auto_map)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=remote)
        _confine_quantization(config)
        multimodal = any(name.endswith("ForConditionalGeneration") for name in config.architectures or ())
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model = loader.from_pretrained(
            directory,
            config=config,
            dtype=settings.torch_dtype,
            use_safetensors=True,  # never a pickle
            trust_remote_code=remote,
            # spreads a target that is larger than one GPU
            device_map="auto" if settings.device == "cuda" else None,
        )
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"transformers cannot load {directory} ({short(error)})") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"the target does not fit in memory on {settings.device} ({short(error)}); free what another process "
            "holds, or use --engine vllm with --tensor-parallel-size"
        ) from error
    for parameter in model.parameters():  # those of a quantised checkpoint come as they are stored
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(settings.torch_dtype)
    return model.eval()


def _confine_quantization(config: Any) -> None:
    """Keep compressed-tensors (Kimi's INT4) to the text model, and unpack while loading.

    transformers would take the vision tower for packed as well, and unpack, with a bar, in the first forward pass.
    """
    text = config.get_text_config()
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if text is not config and isinstance(quantization, dict) and quantization["quant_method"] == "compressed-tensors":
        quantization["ignore"] = [*(quantization.get("ignore") or ()), "re:.*(vision|visual|projector).*"]
        quantization["dequantize"] = True


def _find_decoder(model: torch.nn.Module, settings: EngineSettings) -> Any:
    """The module that holds the text model's `layers` and the final `norm` that feeds lm_head."""
    module: Any = model
    while module is not None:
        if hasattr(module, "layers") and hasattr(module, "norm"):
            if len(module.layers) != settings.target.num_layers:
                break
            return module
        module = next((getattr(module, name) for name in ("language_model", "model") if hasattr(module, name)), None)
    raise UserError(
        f"{type(model).__name__}: no module with {settings.target.num_layers} `layers` and a final `norm` was found; "
        "use --engine vllm"
    )
