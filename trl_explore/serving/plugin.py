"""What a vLLM server loads at its start: the weight-transfer engine `file`."""

from contextlib import suppress


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "file"}'` known; vLLM calls it in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # registered before: plug-ins may be loaded twice
        WeightTransferEngineFactory.register_engine("file", "trl_explore.serving.engine", "FileEngine")
