"""What goes to the Hub, and what is said when the Hub does not take it."""

import fnmatch
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Never published. The pickled arguments hold paths of this machine, and nobody needs them.
UNPUBLISHED = ("training_args.bin", "*/training_args.bin", "*.part", ".git/*", ".cache/*")
# What a checkpoint holds of the model itself.
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
LINKED_FROM = 10 * 2**20  # bytes: a copy of what is larger would take time and room

REMEDIES = {
    401: "the Hub does not accept the token: log in anew with `hf auth login`, or set HF_TOKEN",
    403: "the token has no write access there: log in with one that has (`hf auth login`), or choose another "
    "`hub_model_id`",
    404: "the Hub knows no such repository or revision, or hides it from this token: check `hub_model_id`, "
    "`hub_revision` and the token's rights",
}


class HubError(RuntimeError):
    """The Hub did not take what was to be published; the message says why, and how to try again."""


def check_repo_id(hub_model_id: str | None, output_dir: str | os.PathLike) -> str:
    """The name to publish under; a `ValueError` if the Hub forbids it."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    name = hub_model_id or Path(output_dir).absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        given = f"`hub_model_id={hub_model_id!r}`" if hub_model_id else f"the name of the output folder, {name!r},"
        raise ValueError(
            f"{given} cannot be the name of a repository: set `hub_model_id` to `name` or `owner/name`, of letters, "
            "digits, `_`, `-` and `.` (the last two neither doubled nor at an end), at most 96 characters."
        ) from error
    return name


def clash(existing: Iterable[str], architectures: Sequence[str], *, adapter: bool, architecture: str) -> str | None:
    """What a repository holds that a model must not be pushed over; `None` where nothing stands against it."""
    files = set(existing)
    # A repository with both loads as the adapter, and its own weights are passed over without a word.
    if ADAPTER_CONFIG in files and not adapter:
        return "an adapter, and this is a whole model"
    if adapter and "config.json" in files and ADAPTER_CONFIG not in files:
        return "a whole model, and this is an adapter"
    if not adapter and architectures and architecture not in architectures:
        return f"a {architectures[0]}, and this is a {architecture}"
    return None


def stage(folder: Path, target: Path, *, allow: Sequence[str] = ("*",), ignore: Sequence[str] = ()) -> None:
    """Put what is to be published into a folder of its own, which training does not touch while it is sent."""
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
            return os.link(source, copy)
        except OSError:  # file systems without hard links
            pass
    shutil.copy2(source, copy)


def _forget_local_base(path: Path) -> None:
    """An adapter of a local model names its folder: nobody else has that, and it tells of this machine."""
    config = json.loads(path.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and Path(base).exists():
        config["base_model_name_or_path"] = Path(base).resolve().name
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def explain(error: BaseException) -> str:
    """One line on what went wrong between here and the Hub, with the remedy where there is one."""
    from huggingface_hub.utils import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
    status, message = cause.response.status_code, " ".join((cause.server_message or "").split())
    said = f" ({message})" if message else ""
    return f"{REMEDIES.get(status, f'the Hub answered {status}')}{said}"


@dataclass(frozen=True)
class PushPlan:
    """
    What a push would send.

    Args:
        repo_id (`str`):
            Repository, `owner/name`, or `name` for one of the account that the token belongs to.
        revision (`str`, *optional*):
            Branch; `None` for the main one.
        private (`bool`):
            Whether the repository is made private if it does not exist yet.
        folder (`Path`):
            Folder that holds the files.
        files (`dict[str, int]`):
            Bytes of every file, by its path in the repository.
    """

    repo_id: str
    revision: str | None
    private: bool
    folder: Path
    files: dict[str, int]

    def __str__(self) -> str:
        account = "" if "/" in self.repo_id else ", of the account that your token belongs to"
        lines = [
            "Dry run: nothing was sent. Publishing would send",
            *(f"  {format_size(size):>10}  {name}" for name, size in self.files.items()),
            f"  {format_size(sum(self.files.values())):>10}  in {len(self.files)} files",
            f"to the {'private' if self.private else 'public'} repository {self.repo_id}{account} "
            f"(branch {self.revision or 'main'}; one that exists stays as visible as it is).",
            f"The files are in {self.folder}. Not checked: the token, its rights, and what the repository holds.",
            "To publish, run the same without `push_dry_run`, or send these files with:",
            f"  {upload_command(self.repo_id, self.folder, revision=self.revision, private=self.private)}",
        ]
        return "\n".join(lines)


def plan_push(repo_id: str, folder: Path, *, revision: str | None, private: bool) -> PushPlan:
    """Return what sending a folder would do."""
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
    """The command that sends a folder, as a line for the shell."""
    options = [*(["--revision", revision] if revision else []), *(["--private"] if private else [])]
    return shlex.join(["hf", "upload", repo_id, str(folder), ".", *options])
