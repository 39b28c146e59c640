"""Gradient features of G2RL: the gradient of a response's log-probability at the input of the LM head.

See G2RL (https://huggingface.co/papers/2512.15687), section 2.2. The feature is linear in the weight of the head. So
the residuals (one-hot minus probabilities) of all tokens are summed first, and one product with the weight follows.
One pass over the logits of a few tokens at a time yields the sum, the log-probabilities and the entropies.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import ModulesToSaveWrapper
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Bytes of the largest float32 tensor of the pass. About three such tensors exist at once, four with soft-capping.
MAX_TILE_BYTES = 2**27

# Fields of a configuration that scale the logits, in the order in which TRL looks for them.
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


class LMHead(NamedTuple):
    """
    Parameters of the LM head.

    The head maps its input `h` to `softmax(cap(scale * (weight @ h + bias)) / temperature)`, with
    `cap(z) = softcap * tanh(z / softcap)`, or `cap(z) = z` if `softcap` is None.
    """

    weight: torch.Tensor  # `(V, D)`
    bias: torch.Tensor | None = None  # `(V,)`
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


class SequenceFeatures(NamedTuple):
    """Float32 results of one pass over B responses."""

    features: torch.Tensor  # `(B, D)`; 0 for responses without tokens in `mask`
    log_probs: torch.Tensor  # `(B, T)`; 0 for tokens that were not scored
    entropies: torch.Tensor  # of the distributions that tokens were sampled from, in nats, `(B, T)`; 0 if not scored


def lm_head_of(model: Any, *, temperature: float = 1.0) -> LMHead:
    """
    Return the LM head that a model currently uses: views of its parameters, or a merged copy if LoRA is active on it.

    Tied embeddings, trained copies of the head (`modules_to_save`), LoRA on the head, and disabled adapters are
    supported. A head that FSDP2 shards is gathered here, so all processes must call. A head that DeepSpeed ZeRO-3
    shards must be gathered by the caller while it uses the result.

    Args:
        model (`Any`):
            Unwrapped model, with its adapters.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.

    Returns:
        [`LMHead`]: The head.

    Raises:
        ValueError: If the model has no output embeddings, if they are quantized, or if they have an adapter other than
            plain LoRA.
    """
    base: Any = model
    if isinstance(model, PeftModel):
        base = model.get_base_model()
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
    if isinstance(bias, DTensor):
        bias = bias.full_tensor()
    if bias is not None:
        bias = bias.detach()
    config = base.config.get_text_config()
    return LMHead(
        weight=weight.detach(),
        bias=bias,
        scale=logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        temperature=temperature,
    )


def effective_parameters(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight `(V, D)` and the bias `(V,)` of a head, with active LoRA adapters merged. Raise a ValueError
    if the head is not linear or has an adapter other than plain LoRA."""
    if isinstance(layer, torch.nn.Linear | ModulesToSaveWrapper):
        return layer.weight, layer.bias
    if not isinstance(layer, LoraLinear):
        raise ValueError(
            f"The LM head is a {type(layer).__module__}.{type(layer).__name__}, whose gradient is not known: use a "
            "linear head, without an adapter or with LoRA."
        )
    base: Any = layer.get_base_layer()
    weight, bias = base.weight, base.bias
    if layer.disable_adapters or layer.merged:  # merged adapters are already part of the base weight
        return weight, bias
    for name in layer.active_adapters:
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


def logit_scale(config: "PreTrainedConfig") -> float:
    """Return the factor by which a text model multiplies its logits before soft-capping. 1 if it does not scale."""
    for name in MULTIPLIERS:
        factor = getattr(config, name, None)
        if factor is not None:
            return factor
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # HyperCLOVA X multiplies by `logits_scaling`; other models divide by it.
    if config.model_type == "hyperclovax":
        return scaling
    return 1 / scaling


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
    Compute the gradient features of responses, and log-probabilities and entropies of their tokens.

    The feature of a response is the mean over its tokens of `temperature * d log p(token) / d hidden` (Eq. 6-8, 14).
    Without scaling and soft-capping, the gradient of a token is `weight[token] - sum_v p(v) weight[v]`. With them, it
    has their exact derivatives as factors.

    Logits are rounded as in TRL's fused head: to the type of `hidden`, or to the type of an enclosing autocast. So
    log-probabilities are the same as in the loss. All other computations are in float32. The results of a response do
    not depend on the other responses of the batch, and a NaN affects only its own response.

    Args:
        hidden (`torch.Tensor`):
            Hidden states `(B, T, D)`. `hidden[:, t]` is the state from which token t was sampled, so it belongs to the
            position before the token.
        token_ids (`torch.Tensor`):
            Token ids `(B, T)`.
        mask (`torch.Tensor`):
            1 for tokens that the features average over, `(B, T)`.
        head ([`LMHead`]):
            The LM head.
        score_mask (`torch.Tensor`, *optional*):
            1 for further tokens that get log-probabilities and entropies, such as answers of tools, `(B, T)`.
        max_tile_bytes (`int`, *optional*):
            Most bytes of a temporary float32 tensor. A tensor is larger only if the logits of one token or one row of
            the weight need more.

    Returns:
        [`SequenceFeatures`]: Features, log-probabilities and entropies.

    Raises:
        ValueError: If the shapes do not match.
    """
    vocabulary, width = 0, 0  # ZeRO-3 leaves an empty weight of one dimension; the check below refuses it
    if head.weight.dim() == 2:
        vocabulary, width = head.weight.shape
    same_tokens = hidden.shape[:2] == token_ids.shape == mask.shape
    if hidden.dim() != 3 or hidden.shape[2] != width or not same_tokens:
        raise ValueError(
            f"`hidden` {tuple(hidden.shape)}, `token_ids` {tuple(token_ids.shape)}, `mask` {tuple(mask.shape)} and "
            f"the head's weight {tuple(head.weight.shape)} must be (B, T, D), (B, T), (B, T) and (V, D). A weight "
            "without elements is sharded: gather it first."
        )
    device = head.weight.device
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    hidden, token_ids, mask = hidden.to(device), token_ids.to(device), mask.to(device).bool()
    scored = mask
    if score_mask is not None:
        scored = mask | score_mask.to(device).bool()
    num_scored = scored.sum(1).tolist()
    columns = scored.nonzero()[:, 1].split(num_scored)  # positions of the scored tokens of each response, [B]
    # Convert the parameters once for all tiles. This takes no more memory than autocast, which keeps a copy, too.
    bias = head.bias
    if bias is not None:
        bias = bias.to(dtype)
    projection = head._replace(weight=head.weight.to(dtype), bias=bias)
    features = hidden.new_zeros(len(mask), width, dtype=torch.float32)  # (B, D)
    log_probs, entropies = features.new_zeros(2, *mask.shape)  # (B, T) each
    # A float32 tensor of `size` rows and V columns has at most `max_tile_bytes`. A tile has logits for `size` tokens.
    # The residuals are summed per response, for `size` responses at once.
    size = max(1, max_tile_bytes // (4 * vocabulary))
    with torch.autocast(device.type, enabled=False):  # logits have the type chosen above, all other tensors float32
        for start in range(0, len(mask), size):
            residuals = features.new_zeros(min(size, len(mask) - start), vocabulary)
            for tile in _tiles(columns, range(start, start + len(residuals)), size):
                logits, rows = [], []
                for piece in tile:
                    # One product per response, so that its rounding does not depend on the other responses.
                    logits.append(hidden[piece.row, piece.columns].to(dtype) @ projection.weight.T)
                    rows.append(piece.columns.new_full(piece.columns.shape, piece.row))
                all_logits = logits[0]  # do not copy a single tensor
                if len(logits) > 1:
                    all_logits = torch.cat(logits)
                where = torch.cat(rows), torch.cat([piece.columns for piece in tile])
                token_residuals, tile_log_probs, tile_entropies = score_tokens(
                    all_logits, token_ids[where], projection
                )
                log_probs[where], entropies[where] = tile_log_probs, tile_entropies
                # Tokens that are only in `score_mask` do not count for the features.
                counted = token_residuals.mul_(mask[where].unsqueeze(1))
                per_piece = counted.split([len(piece.columns) for piece in tile])
                for piece, of_piece in zip(tile, per_piece, strict=True):
                    residuals[piece.row - start] += of_piece.sum(0)
            features[start : start + size] = project(residuals, head.weight, max_tile_bytes=max_tile_bytes)
    features *= head.scale / mask.sum(1, keepdim=True).clamp(min=1)
    return SequenceFeatures(features, log_probs, entropies)


class _Piece(NamedTuple):
    """Tokens of one response."""

    row: int
    columns: torch.Tensor


def _tiles(columns: Sequence[torch.Tensor], rows: Iterable[int], size: int) -> Iterator[list[_Piece]]:
    """Cut the scored tokens of `rows` into pieces, and yield lists of consecutive pieces with at most `size` tokens
    together. `columns` has the positions of the scored tokens of each response."""
    tile: list[_Piece] = []
    room = size
    for row in rows:
        for places in columns[row].split(size):
            if len(places) > room:
                yield tile
                tile, room = [], size
            if len(places):
                tile.append(_Piece(row, places))
                room -= len(places)
    if tile:
        yield tile


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, head: LMHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Compute residuals, log-probabilities and entropies of tokens.

    Args:
        logits (`torch.Tensor`):
            Products of hidden states with the head's weight, `(T, V)`. They are overwritten.
        tokens (`torch.Tensor`):
            Token ids `(T,)`.
        head ([`LMHead`]):
            The head, in the type of the logits.

    Returns:
        `tuple`: Residuals `(T, V)`, log-probabilities `(T,)` and entropies in nats `(T,)`. Residuals are `temperature`
        times the gradient of the log-probability with respect to the scaled logits before soft-capping. Without
        soft-capping this is one-hot minus probabilities.
    """
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
    if slope is not None:
        residuals.mul_(slope)
    return residuals, log_probs, entropies


def project(residuals: torch.Tensor, weight: torch.Tensor, *, max_tile_bytes: int) -> torch.Tensor:
    """Return the float32 product `(B, D)` of residuals `(B, V)` and a weight `(V, D)`. The weight is converted to
    float32 in pieces of at most `max_tile_bytes`."""
    size = max(1, max_tile_bytes // (4 * weight.shape[1]))
    product = residuals.new_zeros(len(residuals), weight.shape[1])
    for part, rows in zip(residuals.split(size, dim=1), weight.split(size), strict=True):
        product.addmm_(part, rows.float())
    return product
