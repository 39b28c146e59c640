"""The gradient of a response's log-probability at the input of the LM head.

After G2RL (https://huggingface.co/papers/2512.15687), section 2.2. The feature is linear in the head's weight, so a
response needs one sum over its tokens in the space of the vocabulary and one product with the weight at the end; the
logits of a few tokens at a time give that sum, the log-probabilities and the entropies in one pass.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import ModulesToSaveWrapper
from torch.distributed.tensor import DTensor

# Size of one float32 tensor of the pass; a tile keeps about three of them alive, four under soft-capping.
MAX_TILE_BYTES = 2**27

# What families multiply their logits by, under the names and in the order in which TRL looks for them.
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


class LMHead(NamedTuple):
    """The LM head as a function of its input `h`: `softmax(cap(scale * (weight @ h + bias)) / temperature)` with
    `cap(z) = softcap * tanh(z / softcap)`, or none."""

    weight: torch.Tensor  # `(V, D)`
    bias: torch.Tensor | None = None  # `(V,)`
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


class SequenceFeatures(NamedTuple):
    """What one pass over the tokens of B responses gives, in float32; 0 where no token counts or was scored."""

    features: torch.Tensor  # `(B, D)`
    log_probs: torch.Tensor  # `(B, T)`
    entropies: torch.Tensor  # in nats, where each token was drawn, `(B, T)`


def lm_head_of(model: Any, *, temperature: float = 1.0) -> LMHead:
    """
    The LM head that an unwrapped model uses now: views of its parameters, or a merged copy with active LoRA.

    Tied embeddings, adapters that train a copy of the head (`modules_to_save`), LoRA on the head and switched-off
    adapters are followed. A head sharded by FSDP2 is gathered, on all processes together; one sharded by DeepSpeed
    ZeRO-3 must be gathered around the call and while the result is used. ValueError without output embeddings, for
    quantized ones, and for other adapters on them.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layer = base.get_output_embeddings()
    if layer is None:
        raise ValueError(
            f"{type(base).__name__} has no output embeddings to take gradients at: load the model with "
            "`AutoModelForCausalLM`."
        )
    weight, bias = effective_parameters(layer)
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"The LM head of {type(base).__name__} is quantized ({weight.dtype}), so its gradient is not known: leave "
            "it out of the quantization, for example with `llm_int8_skip_modules=['lm_head']`."
        )
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    config = base.config.get_text_config()
    return LMHead(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        scale=logit_scale(config),
        softcap=vars(config).get("final_logit_softcapping"),
        temperature=temperature,
    )


def effective_parameters(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight `(V, D)` and bias `(V,)` of a head. ValueError if it is not linear, or its adapter no plain LoRA."""
    if isinstance(layer, torch.nn.Linear | ModulesToSaveWrapper):
        return layer.weight, layer.bias
    if not isinstance(layer, LoraLinear):
        raise ValueError(
            f"The LM head is a {type(layer).__module__}.{type(layer).__name__}, whose gradient is not known: use a "
            "linear head, without an adapter or with LoRA."
        )
    base: Any = layer.get_base_layer()
    weight, bias = base.weight, base.bias
    # An adapter that is merged is part of the base weight already.
    active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
    for name in active:
        if name in layer.lora_variant:
            raise ValueError(
                f"The LM head has an adapter {name!r} of the kind {type(layer.lora_variant[name]).__name__}, whose "
                "gradient is not known: use plain LoRA there, or leave the head out of `target_modules`."
            )
        if name in layer.lora_A:
            weight = weight + layer.get_delta_weight(name).to(weight.dtype)
            if layer.lora_bias[name]:
                shift: Any = layer.lora_B[name].bias * layer.scaling[name]
                bias = shift if bias is None else bias + shift
    return weight, bias


def logit_scale(config: Any) -> float:
    """What a text model multiplies its logits by, before any soft-capping; 1 for models that do not scale."""
    fields = vars(config)
    for name in MULTIPLIERS:
        if fields.get(name) is not None:
            return fields[name]
    scaling = fields.get("logits_scaling")
    if scaling is None:
        return 1.0
    # HyperCLOVA X multiplies by the field by which the others divide.
    return scaling if config.model_type == "hyperclovax" else 1 / scaling


@torch.no_grad()
def sequence_features(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    mask: torch.Tensor,
    head: LMHead,
    *,
    score_mask: torch.Tensor | None = None,
    max_tile_bytes: int = MAX_TILE_BYTES,
) -> SequenceFeatures:
    """
    Means of `temperature * d log p(token) / d hidden` (Eq. 6-8, 14), and tokens' log-probabilities and entropies.

    For a plain head a token's gradient is `weight[token] - sum_v p(v) weight[v]`; scaling and soft-capping of the
    logits enter through their exact derivatives. Logits are rounded where TRL's fused head rounds them (to the type of
    `hidden`, or of an enclosing autocast), so that log-probabilities are those of the loss; all else is float32. Every
    response is computed by itself: what it gives does not depend on its batch, and a NaN stays in its row.

    Position t of `hidden`, `(B, T, D)`, is where token t was drawn, one before its own. `mask`, `(B, T)`, marks the
    tokens of the feature, `score_mask` further ones to score, such as those of tools. `max_tile_bytes` bounds float32
    tensors beside the results, unless one token's logits or one row of the weight are larger. ValueError if shapes do
    not match.
    """
    vocabulary, width = head.weight.shape if head.weight.dim() == 2 else (0, 0)
    if hidden.dim() != 3 or hidden.shape[2] != width or not hidden.shape[:2] == token_ids.shape == mask.shape:
        raise ValueError(
            f"`hidden` {tuple(hidden.shape)}, `token_ids` {tuple(token_ids.shape)}, `mask` {tuple(mask.shape)} and "
            f"the head's weight {tuple(head.weight.shape)} must be (B, T, D), (B, T), (B, T) and (V, D). A weight "
            "without elements is sharded: gather it first."
        )
    device = head.weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden.dtype
    hidden, token_ids, mask = hidden.to(device), token_ids.to(device), mask.to(device).bool()
    scored = mask if score_mask is None else mask | score_mask.to(device).bool()
    columns = scored.nonzero()[:, 1].split(scored.sum(1).tolist())  # [B][number scored]
    # One copy for all tiles where the types differ, as autocast itself would keep one.
    bias = None if head.bias is None else head.bias.to(dtype)
    projection = head._replace(weight=head.weight.to(dtype), bias=bias)
    features = hidden.new_zeros(len(mask), width, dtype=torch.float32)  # (B, D)
    log_probs, entropies = features.new_zeros(2, *mask.shape)  # (B, T) each
    size = max(1, max_tile_bytes // (4 * vocabulary))
    with torch.autocast(device.type, enabled=False):  # the logits' type is chosen above, the rest stays in float32
        for start in range(0, len(mask), size):
            residuals = features.new_zeros(min(size, len(mask) - start), vocabulary)
            parts = [
                (row, p) for row in range(start, start + len(residuals)) for p in columns[row].split(size) if len(p)
            ]
            for tile in _tiles(parts, size):
                # A product for each response: what it gives does not depend on the others of its tile.
                logits = [hidden[row, part].to(dtype) @ projection.weight.T for row, part in tile]
                rows = torch.cat([part.new_full(part.shape, row) for row, part in tile])
                places = torch.cat([part for _, part in tile])
                token_residuals, log_probs[rows, places], entropies[rows, places] = score_tokens(
                    torch.cat(logits) if len(logits) > 1 else logits[0], token_ids[rows, places], projection
                )
                counted = token_residuals.mul_(mask[rows, places, None]).split([len(part) for _, part in tile])
                for (row, _), of_part in zip(tile, counted, strict=True):
                    residuals[row - start] += of_part.sum(0)
            features[start : start + size] = project(residuals, head.weight, max_tile_bytes=max_tile_bytes)
    features *= head.scale / mask.sum(1, keepdim=True).clamp(min=1)
    return SequenceFeatures(features, log_probs, entropies)


def _tiles(parts: list[tuple[int, torch.Tensor]], size: int) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Parts of responses, as many in a row as have `size` tokens together."""
    tile: list[tuple[int, torch.Tensor]] = []
    room = size
    for row, places in parts:
        if len(places) > room:
            yield tile
            tile, room = [], size
        tile.append((row, places))
        room -= len(places)
    if tile:
        yield tile


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, head: LMHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of products with the head's weight `(T, V)`: residuals `(T, V)` (`temperature` times the gradient of the
    log-probabilities in the scaled logits before soft-capping: one-hot minus probabilities for a plain head),
    log-probabilities and entropies `(T,)`."""
    if head.bias is not None:
        logits += head.bias
    logits = logits.float().mul_(head.scale)
    slope = None
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(head.softcap)
    log_p = logits.div_(head.temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    residuals = log_p.exp()
    entropies = -log_p.mul_(residuals).sum(-1)
    residuals.neg_()
    residuals[torch.arange(len(tokens), device=tokens.device), tokens] += 1
    return residuals if slope is None else residuals.mul_(slope), log_probs, entropies


def project(residuals: torch.Tensor, weight: torch.Tensor, *, max_tile_bytes: int) -> torch.Tensor:
    """Float32 product `(B, D)` of residuals `(B, V)` and a weight `(V, D)`, converted in parts of `max_tile_bytes`."""
    size = max(1, max_tile_bytes // (4 * weight.shape[1]))
    product = residuals.new_zeros(len(residuals), weight.shape[1])
    for part, rows in zip(residuals.split(size, dim=1), weight.split(size), strict=True):
        product.addmm_(part, rows.float())
    return product
