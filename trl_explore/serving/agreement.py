"""Checks that a vLLM server fits a trainer. Error messages contain the command that starts a fitting server."""

import hashlib
import os
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

WEIGHT_SYNCS = ("auto", "nccl", "file")
# Fields of a model's configuration. If one differs, the server serves another model.
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

_held: dict[str, IO[str]] = {}  # open lock files of the servers that this process uses, by name


def serve_command(model: str, *, backend: str, port: int = 8000, max_model_len: int | None = None) -> str:
    """
    Return the shell command that starts a vLLM server for a trainer.

    Args:
        model (`str`):
            Name or folder of the model.
        backend (`str`):
            Way in which weights reach the server, `"nccl"` or `"file"`.
        port (`int`, *optional*, defaults to `8000`):
            Port of the server.
        max_model_len (`int`, *optional*):
            Most tokens of a prompt with its completion. By default the limit of the model.

    Returns:
        `str`: The command.
    """
    length = ""
    if max_model_len is not None:
        length = f" --max-model-len {max_model_len}"
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {model} --port {port}{length} --weight-transfer-config "
        f"""'{{"backend": "{backend}"}}' --logprobs-mode processed_logprobs --max-logprobs -1"""
    )


def wait_until_healthy(url: str, *, seconds: float, command: str) -> None:
    """
    Wait for a server that may still be loading its model.

    Args:
        url (`str`):
            Address of the server.
        seconds (`float`):
            Longest time to wait.
        command (`str`):
            Command that starts the server, for the message.

    Raises:
        ConnectionError: If no vLLM server answers in time.
    """
    deadline, found = time.monotonic() + seconds, "nothing answers there"
    open_url = url_opener(url)
    while True:
        try:
            with open_url(f"{url}/health", timeout=max(seconds, 1)):
                return
        except urllib.error.HTTPError as error:
            found = f"the program that answers there is no vLLM server, or one that has failed (status {error.code})"
        except OSError as error:
            found = f"nothing answers there ({error})"
        if time.monotonic() >= deadline:
            raise ConnectionError(
                f"no vLLM server at {url} after {seconds:g} s: {found}. Start one with `{command}`, or correct "
                "`vllm_server_host` and `vllm_server_port` (or `vllm_server_base_url`)."
            )
        time.sleep(min(0.5, seconds))


def url_opener(url: str) -> Callable[..., Any]:
    """Return the function that opens a URL. It uses no proxy for a server on this machine, which no proxy reaches."""
    if any(f"://{host}" in url for host in ("127.0.0.1", "localhost", "0.0.0.0")):
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    return urllib.request.urlopen


def check_server(
    info: dict[str, Any],
    served: dict[str, Any] | None,
    trained: dict[str, Any],
    *,
    backend: str,
    url: str,
    command: str,
) -> None:
    """
    Check that the settings of a server fit the run.

    Args:
        info (`dict[str, Any]`):
            `vllm_config` of the server's `/server_info`.
        served (`dict[str, Any]`, *optional*):
            Text configuration of the server's model. None if it cannot be read on this machine.
        trained (`dict[str, Any]`):
            Text configuration of the model in training.
        backend (`str`):
            Way in which weights reach the server, `"nccl"` or `"file"`.
        url (`str`):
            Address of the server, for the messages.
        command (`str`):
            Command that starts a fitting server, for the messages.

    Raises:
        ValueError: If the server has another model or another way of weight transfer.
    """
    for name in SIZES:
        if served is not None and served.get(name) != trained.get(name):
            raise ValueError(
                f"the vLLM server at {url} serves another model ({info['model_config']['model']!r}): its `{name}` is "
                f"{served.get(name)}, but for the model in training it is {trained.get(name)}. Restart it with "
                f"`{command}`."
            )
    transfer = info["weight_transfer_config"]
    if transfer is None or transfer["backend"] != backend:
        found = "none"
        if transfer is not None:
            found = repr(transfer["backend"])
        raise ValueError(
            f"the trainer sends weights by {backend!r}, but the weight-transfer engine of the vLLM server at {url} is "
            f"{found}. Restart it with `{command}`, or set `vllm_weight_sync` to the engine of the server."
        )


def check_vocabulary(ours: str, theirs: str, *, url: str, command: str) -> None:
    """
    Check that trainer and server decode the same tokens to the same text, apart from spaces.

    Args:
        ours (`str`):
            Text of some tokens with the tokenizer of the trainer.
        theirs (`str`):
            Text of the same tokens with the tokenizer of the server.
        url (`str`):
            Address of the server, for the message.
        command (`str`):
            Command that starts the server, for the message.

    Raises:
        ValueError: If the texts differ.
    """
    ours, theirs = "".join(ours.split()), "".join(theirs.split())
    if ours != theirs:
        place = min(len(ours), len(theirs))  # if one text is the beginning of the other
        for position, (our_character, their_character) in enumerate(zip(ours, theirs, strict=False)):
            if our_character != their_character:
                place = position
                break
        raise ValueError(
            f"the vLLM server at {url} has another tokenizer: it decodes the tokens of "
            f"{ours[place : place + 20]!r} to {theirs[place : place + 20]!r}. Restart it with "
            f"`{command} --tokenizer FOLDER`, where FOLDER is the folder or the name of the tokenizer that is passed "
            "as `processing_class`."
        )


def hold(url: str) -> None:
    """
    Lock a server for the trainers of this process, until the process ends or calls [`release`].

    Args:
        url (`str`):
            Address of the server.

    Raises:
        RuntimeError: If another process on this machine has locked the server, or a lock cannot be made safely.
    """
    import fcntl  # not at the top: every trainer imports this module, also on systems without file locks

    name = _lock_name(url)
    if name in _held:
        return
    folder = _lock_folder()
    try:
        file = _open_lock(folder, name)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RuntimeError(
            f"another trainer (process {owner}) uses the vLLM server at {url}: each trainer would sample from the "
            "weights of the other. Start a second server with another `--port` and pass its `vllm_server_port`, or "
            "end that process."
        ) from None
    except OSError as error:
        raise RuntimeError(
            f"the folder {folder} cannot hold the lock of a vLLM server: {error}. It must be a folder and not a link, "
            "no other user may write to it, and its disk must support file locks. Remove it, or set the "
            "environment variable TRL_EXPLORE_CACHE to another folder."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _held[name] = file


def release(url: str) -> None:
    """Unlock a server that this process has locked."""
    _held.pop(_lock_name(url)).close()


def _lock_name(url: str) -> str:
    """Return the name of the lock file of a server."""
    url = url.rstrip("/").replace("//localhost", "//127.0.0.1").replace("//0.0.0.0", "//127.0.0.1")
    # The name depends on the machine, because several machines may share a home folder.
    return f"{hashlib.sha256(f'{platform.node()} {url}'.encode()).hexdigest()[:16]}.lock"


def _lock_folder() -> Path:
    cache = os.environ.get("TRL_EXPLORE_CACHE") or Path.home() / ".cache" / "trl-explore"
    return Path(cache).expanduser() / "locks"


def _open_lock(folder: Path, name: str) -> IO[str]:
    """Open a lock file. Raise an OSError if another user could have replaced it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # If another user could put a link into the folder, `hold` would empty the file to which the link points.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise PermissionError("it belongs to another user, or others can write to it")
        return os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=descriptor), "r+")
    finally:
        os.close(descriptor)
