"""Plug-in that a vLLM server loads at its start. It adds the weight-transfer engine `file`."""

from contextlib import suppress


def register() -> None:
    """Register the engine for `--weight-transfer-config '{"backend": "file"}'`. vLLM calls this in every process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # vLLM may load a plug-in twice
        WeightTransferEngineFactory.register_engine("file", "trl_explore.serving.engine", "FileEngine")
