"""Engine that loads the trainer's weights from files in a vLLM server. Only a vLLM server imports this module."""

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
    """Data that the trainer sends before the first transfer. Empty."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Data that the trainer sends for each transfer."""

    path: str  # complete safetensors file that the server can read
    names: list[str]  # names of all its tensors


class FileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """
    Loads weights from safetensors files, for servers on a CPU or without a GPU network to the trainer.

    The engine checks a file before it changes the model. If the check fails, the server keeps its weights.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing, because files need no connection."""

    def start_weight_update(self) -> None:
        """Do nothing. If a reload began here and the trainer then crashed, the server would have no weights."""

    def finish_weight_update(self) -> None:
        """Do nothing, because the weights are complete as soon as the file is read."""

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
            # On a CPU, vLLM multiplies by a packed copy of the head's weight. A head that is tied to the embedding has
            # no tensor of its own in the file, so vLLM does not update the copy by itself.
            for name, module in self.model.named_modules():
                if name.endswith("lm_head") and f"{name}.weight" not in names:
                    module.quant_method.process_weights_after_loading(module)

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Do nothing. Older vLLM versions require this method; our trainer writes the file instead."""

    def shutdown(self) -> None:
        """Do nothing, because no resources are held."""


def _check(update_info: FileUpdateInfo) -> None:
    """Raise a ValueError if the file cannot be read or has other tensors than `names`."""
    try:
        with safe_open(update_info.path, framework="pt") as file:
            different = sorted(set(update_info.names) ^ set(file.keys()))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {update_info.path}: {error}") from error
    if different:
        raise ValueError(f"{update_info.path} has other tensors than the trainer announced: {different[:5]}")
