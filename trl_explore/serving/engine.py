"""vLLM's side of weights that travel through files; only a vLLM server imports this."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """What a trainer asks for."""

    path: str  # a complete safetensors file that this process can read
    names: list[str]  # of its tensors


class FileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights from safetensors files: for CPU servers, and for servers without a GPU network to the trainer. A
    file that cannot be used is refused before the model is touched: the server goes on with the weights it has."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Nothing yet: a model that waits for weights would be lost with the trainer that promised them."""

    def finish_weight_update(self) -> None:
        """Done when the file was read."""

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        names = update_info.names
        _check(update_info)
        with safe_open(update_info.path, framework="pt", device=str(self.device)) as file:
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in names)
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A head multiplies by a packed copy of its weight there. One that is tied to the embedding gets no weight
            # of its own in this call, so that nothing else would renew its copy.
            for name, module in self.model.named_modules():
                if name.endswith("lm_head") and f"{name}.weight" not in names:
                    module.quant_method.process_weights_after_loading(module)

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Older servers want it of an engine: the trainer's half, which here is writing the file."""

    def shutdown(self) -> None:
        """Nothing is held."""


def _check(update_info: FileUpdateInfo) -> None:
    try:
        with safe_open(update_info.path, framework="pt") as file:
            different = sorted(set(update_info.names) ^ set(file.keys()))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {update_info.path}: {error}") from error
    if different:
        raise ValueError(f"{update_info.path} does not hold what was announced: {different[:5]}")
