"""Files to publish on the Hub, and explanations of the Hub's errors."""

import fnmatch
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Never published. The pickled arguments contain paths of this machine.
UNPUBLISHED = ("training_args.bin", "*/training_args.bin", "*.part", ".git/*", ".cache/*")
# Files of a checkpoint that belong to the model.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*.bin",
    "pytorch_model.bin.index.json",
    "adapter_*",
)
ADAPTER_CONFIG = "adapter_config.json"
LINKED_FROM = 10 * 2**20  # bytes; files of this size or more are linked, because copies take time and disk space

REMEDIES = {
    401: "the Hub does not accept the token: log in again with `hf auth login`, or set HF_TOKEN",
    403: "the token has no write access there: log in with one that has (`hf auth login`), or choose another "
    "`hub_model_id`",
    404: "the repository or revision does not exist on the Hub, or this token may not see it: check `hub_model_id`, "
    "`hub_revision` and the token's rights",
}


class HubError(RuntimeError):
    """Raised if publishing on the Hub failed. The message gives the cause and the way to try again."""


def check_repo_id(hub_model_id: str | None, output_dir: str | os.PathLike) -> str:
    """
    Return the name of the repository to publish in.

    Args:
        hub_model_id (`str`, *optional*):
            Name that the user set. `None` uses the name of the output folder.
        output_dir (`str` or `os.PathLike`):
            Output folder of the run.

    Returns:
        `str`: `name` or `owner/name`.

    Raises:
        `ValueError`: If the Hub forbids the name.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    name = hub_model_id or Path(output_dir).absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        given = f"the name of the output folder, {name!r},"
        if hub_model_id:
            given = f"`hub_model_id={hub_model_id!r}`"
        raise ValueError(
            f"{given} cannot be the name of a repository: set `hub_model_id` to `name` or `owner/name`, of letters, "
            "digits, `_`, `-` and `.` (`-` and `.` not doubled and not at an end), at most 96 characters."
        ) from error
    return name


def clash(existing: Iterable[str], architectures: Sequence[str], *, adapter: bool, architecture: str) -> str | None:
    """
    Describe the content of a repository that forbids pushing a model there.

    Args:
        existing (`Iterable[str]`):
            Files of the repository.
        architectures (`Sequence[str]`):
            Architectures in its `config.json`. Empty if unknown.
        adapter (`bool`):
            If `True`, the model to push is an adapter.
        architecture (`str`):
            Class name of the model to push.

    Returns:
        `str` or `None`: Description of the conflict, or `None` if the model can be pushed.
    """
    files = set(existing)
    # If a repository has an adapter and a whole model, transformers loads the adapter, and silently ignores the
    # weights of the whole model.
    if ADAPTER_CONFIG in files and not adapter:
        return "an adapter, and this is a whole model"
    if adapter and "config.json" in files and ADAPTER_CONFIG not in files:
        return "a whole model, and this is an adapter"
    if not adapter and architectures and architecture not in architectures:
        return f"a {architectures[0]}, and this is a {architecture}"
    return None


def stage(folder: Path, target: Path, *, allow: Sequence[str] = ("*",), ignore: Sequence[str] = ()) -> None:
    """
    Link or copy the files to publish into another folder.

    Training may then replace or delete the original files during the upload. It must not write into a large file,
    because a hard link shares its content.

    Args:
        folder (`Path`):
            Folder with the files.
        target (`Path`):
            Folder for the links and copies.
        allow (`Sequence[str]`, *optional*, defaults to `("*",)`):
            Patterns of relative paths to include.
        ignore (`Sequence[str]`, *optional*, defaults to `()`):
            Patterns of relative paths to leave out, in addition to `UNPUBLISHED`.
    """
    for source in sorted(folder.rglob("*")):
        name = source.relative_to(folder).as_posix()
        if source.is_file() and _matches(name, allow) and not _matches(name, [*ignore, *UNPUBLISHED]):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.unlink(missing_ok=True)
            _link_or_copy(source, copy)
            if source.name == ADAPTER_CONFIG:
                _forget_local_base(copy)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _link_or_copy(source: Path, copy: Path) -> None:
    if source.stat().st_size >= LINKED_FROM:
        try:
            os.link(source, copy)
            return
        except OSError:  # file systems without hard links
            pass
    shutil.copy2(source, copy)


def _forget_local_base(path: Path) -> None:
    """Replace the folder of a local base model by its name in an adapter's configuration, to not publish its path."""
    config = json.loads(path.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and Path(base).exists():
        config["base_model_name_or_path"] = Path(base).resolve().name
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def explain(error: BaseException) -> str:
    """
    Explain an error of a request to the Hub in one line.

    Args:
        error (`BaseException`):
            The error.

    Returns:
        `str`: The cause, with a remedy if there is a known one.
    """
    from huggingface_hub.utils import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
    status, message = cause.response.status_code, " ".join((cause.server_message or "").split())
    explanation = REMEDIES.get(status, f"the Hub answered {status}")
    if message:
        explanation += f" ({message})"
    return explanation


@dataclass(frozen=True)
class PushPlan:
    """
    Files that a push would send, and the repository that would receive them.

    Args:
        repo_id (`str`):
            Repository, `owner/name`, or `name` in the account of the token.
        revision (`str`, *optional*):
            Branch. `None` for the main branch.
        private (`bool`):
            If `True`, a new repository would be private.
        folder (`Path`):
            Folder that holds the files.
        files (`dict[str, int]`):
            Size of every file in bytes, by its path in the repository.
    """

    repo_id: str
    revision: str | None
    private: bool
    folder: Path
    files: dict[str, int]

    def __str__(self) -> str:
        account = ""
        if "/" not in self.repo_id:
            account = ", of the account that your token belongs to"
        visibility = "private" if self.private else "public"
        lines = [
            "Dry run: nothing was sent. Publishing would send",
            *(f"  {format_size(size):>10}  {name}" for name, size in self.files.items()),
            f"  {format_size(sum(self.files.values())):>10}  in {len(self.files)} files",
            f"to the {visibility} repository {self.repo_id}{account} "
            f"(branch {self.revision or 'main'}; an existing repository stays private or public).",
            f"The files are in {self.folder}. Not checked: the token, its rights, and the files in the repository.",
            "To publish, run the same without `push_dry_run`, or send these files with:",
            f"  {upload_command(self.repo_id, self.folder, revision=self.revision, private=self.private)}",
        ]
        return "\n".join(lines)


def plan_push(repo_id: str, folder: Path, *, revision: str | None, private: bool) -> PushPlan:
    """
    Return the plan of a push.

    Args:
        repo_id (`str`):
            Repository, `owner/name` or `name`.
        folder (`Path`):
            Folder with the files.
        revision (`str`, *optional*):
            Branch. `None` for the main branch.
        private (`bool`):
            If `True`, a new repository would be private.

    Returns:
        `PushPlan`: The plan.
    """
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
    return PushPlan(repo_id, revision, private, folder, files)


def format_size(size: int) -> str:
    """Return a number of bytes as a short text, such as `"1.2 MB"`."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95 or unit == "GB":
            break
    return f"{value:.1f} {unit}"


def upload_command(repo_id: str, folder: str | os.PathLike, *, revision: str | None, private: bool) -> str:
    """
    Return the shell command that sends a folder to the Hub.

    Args:
        repo_id (`str`):
            Repository, `owner/name` or `name`.
        folder (`str` or `os.PathLike`):
            Folder to send.
        revision (`str`, *optional*):
            Branch. `None` for the main branch.
        private (`bool`):
            If `True`, a new repository is private.

    Returns:
        `str`: The command.
    """
    options = []
    if revision:
        options += ["--revision", revision]
    if private:
        options.append("--private")
    return shlex.join(["hf", "upload", repo_id, str(folder), ".", *options])
