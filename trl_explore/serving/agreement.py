"""What a trainer and a vLLM server must agree on, and the command that mends a disagreement."""

import hashlib
import os
import platform
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

WEIGHT_SYNCS = ("auto", "nccl", "file")
# Sizes by which models of one kind differ; a server that has another value of one of them has another model.
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

_held: dict[str, IO[str]] = {}


def serve_command(model: str, *, backend: str, port: int = 8000, max_model_len: int | None = None) -> str:
    """The shell command of a server that a trainer can use; the context needed is by default the model's own."""
    length = "" if max_model_len is None else f" --max-model-len {max_model_len}"
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {model} --port {port}{length} --weight-transfer-config "
        f"""'{{"backend": "{backend}"}}' --logprobs-mode processed_logprobs --max-logprobs -1"""
    )


def wait_until_healthy(url: str, *, seconds: float, command: str) -> None:
    """Wait for a server that may still be loading its model. ConnectionError, with the `command` that starts it, if
    nothing that is a vLLM server answers in time."""
    deadline, found = time.monotonic() + seconds, "nothing answers there"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({})) if _is_local(url) else None
    while True:
        try:
            with (opener.open if opener else urllib.request.urlopen)(f"{url}/health", timeout=max(seconds, 1)):
                return
        except urllib.error.HTTPError as error:
            found = f"what answers there is no vLLM server, or one that has failed (status {error.code})"
        except OSError as error:
            found = f"nothing answers there ({error})"
        if time.monotonic() >= deadline:
            raise ConnectionError(
                f"no vLLM server at {url} after {seconds:g} s: {found}. Start one with `{command}`, or correct "
                "`vllm_server_host` and `vllm_server_port` (or `vllm_server_base_url`)."
            )
        time.sleep(min(0.5, seconds))


def _is_local(url: str) -> bool:
    return any(f"://{host}" in url for host in ("127.0.0.1", "localhost", "0.0.0.0"))


def check_server(
    info: dict[str, Any],
    served: dict[str, Any] | None,
    trained: dict[str, Any],
    *,
    backend: str,
    url: str,
    command: str,
) -> None:
    """ValueError, with the `command` that mends it, for the first of a server's settings (`vllm_config` of its
    `/server_info`; its model's configuration, where that can be read here) that does not fit the run."""
    for name in SIZES if served is not None else ():
        if served is not None and served.get(name) != trained.get(name):
            raise ValueError(
                f"the vLLM server at {url} serves another model ({info['model_config']['model']!r}): its `{name}` is "
                f"{served.get(name)}, that of the model in training is {trained.get(name)}. Restart it with "
                f"`{command}`."
            )
    transfer = info["weight_transfer_config"]
    if transfer is None or transfer["backend"] != backend:
        found = "none" if transfer is None else repr(transfer["backend"])
        raise ValueError(
            f"weights are to travel by {backend!r}, but the weight-transfer engine of the vLLM server at {url} is "
            f"{found}. Restart it with `{command}`, or set `vllm_weight_sync` to what it has."
        )


def check_vocabulary(ours: str, theirs: str, *, url: str, command: str) -> None:
    """ValueError if the same tokens do not mean the same text on both sides, spaces apart."""
    ours, theirs = "".join(ours.split()), "".join(theirs.split())
    if ours != theirs:
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        raise ValueError(
            f"the vLLM server at {url} has another tokenizer: what reads {ours[place : place + 20]!r} here reads "
            f"{theirs[place : place + 20]!r} there. Restart it with `{command} --tokenizer FOLDER`, with the folder "
            "or name of the tokenizer that is passed as `processing_class`."
        )


def hold(url: str) -> None:
    """Take a server for the trainers of this process, until it ends. RuntimeError if another process on this machine
    has it, or there is no safe place for a lock."""
    import fcntl  # the configuration of every trainer imports this module, also on systems without file locks

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
            f"another trainer (process {owner}) uses the vLLM server at {url}: each would sample from the weights of "
            "the other. Start a second server with another `--port` and pass its `vllm_server_port`, or end that "
            "process."
        ) from None
    except OSError as error:
        raise RuntimeError(
            f"the folder {folder} cannot hold the lock of a vLLM server: {error}. It must be a folder, and no link to "
            "one, that only you can write to, on a disk that knows file locks: remove what is there, or set the "
            "environment variable TRL_EXPLORE_CACHE to another folder."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _held[name] = file


def release(url: str) -> None:
    """Let go of a server that this process holds."""
    _held.pop(_lock_name(url)).close()


def _lock_name(url: str) -> str:
    url = url.rstrip("/").replace("//localhost", "//127.0.0.1").replace("//0.0.0.0", "//127.0.0.1")
    # The machine is in the name, because several may share a home folder.
    return f"{hashlib.sha256(f'{platform.node()} {url}'.encode()).hexdigest()[:16]}.lock"


def _lock_folder() -> Path:
    cache = os.environ.get("TRL_EXPLORE_CACHE") or Path.home() / ".cache" / "trl-explore"
    return Path(cache).expanduser() / "locks"


def _open_lock(folder: Path, name: str) -> IO[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others must not be able to put a link there, through which a file of this user would be emptied.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise PermissionError("it belongs to another user, or others can write to it")
        return os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=descriptor), "r+")
    finally:
        os.close(descriptor)
