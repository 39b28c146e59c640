"""Publishing on the Hub: the model or adapter, a card about its training and, on request, the method's state."""

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub import CommitInfo, HfApi, get_token, run_as_future
from huggingface_hub.utils import RevisionNotFoundError
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from trl_explore import __version__
from trl_explore.publishing.card_metrics import logged_metrics
from trl_explore.publishing.cards import CURVE_FILE, TrainingFacts, model_card, shown_hyperparameters
from trl_explore.publishing.curves import training_curves
from trl_explore.publishing.hub import (
    MODEL_FILES,
    HubError,
    PushPlan,
    check_repo_id,
    clash,
    explain,
    plan_push,
    stage,
    upload_command,
)
from trl_explore.saving.checkpoints import STATE_FILE
from trl_explore.visible_text import visible_text

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

logger = logging.getLogger(__name__)

STAGE = "_hub"  # folder in `output_dir` with the files to send; names with an underscore are not published


class Publisher:
    """
    Publishes a trainer's model with a card of its method.

    The files to send are first linked or copied into another folder, so that training continues during an upload. If a
    push fails during training, it warns, and the next push sends everything. If the final push fails, it raises an
    error with the command that sends the files.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            Its configuration.
    """

    def __init__(self, trainer: Any, args: "ExplorationConfig") -> None:
        self.trainer, self.args = trainer, args
        # Branch of the push or rehearsal that is being prepared. None: `args.hub_revision`.
        self._revision: str | None = None
        self._checkpoints: list[Path] = []  # checkpoints of this run, oldest first
        self._sent: set[str] = set()  # names of the checkpoints that need not be sent again

    @property
    def _branch(self) -> str | None:
        return self._revision or self.args.hub_revision

    @contextmanager
    def _to(self, revision: str | None) -> Iterator[None]:
        """Context in which files and cards are prepared for another branch. Later checkpoints go to the branch of the
        configuration again."""
        self._revision = revision
        try:
            yield
        finally:
            self._revision = None

    # ------------------------------------------------------------------------------------------------ the repository

    def make_repo(self, make: Callable[[str | None], None], token: str | None, private: bool | None) -> None:
        """
        Create the repository and the branch to publish on.

        Args:
            make (`Callable`):
                Method of transformers that creates the repository, given a token.
            token (`str`, *optional*):
                Token. `None` uses the one in the configuration or of the login.
            private (`bool`, *optional*):
                If `True`, a new repository is private. `None` uses the configuration.

        Raises:
            `HubError`: If there is no token, or the Hub refuses.
            `ValueError`: If the name is forbidden, or the repository holds a different kind of model.
        """
        repo_id = check_repo_id(self.args.hub_model_id, self.args.output_dir)
        token = token or self.args.hub_token
        if (token or get_token()) is None:
            raise HubError(
                f"publishing as {repo_id!r} needs a token: log in with `hf auth login`, or set HF_TOKEN; or leave "
                "`push_to_hub` out."
            )
        private_repo = self.args.hub_private_repo
        # Older versions of transformers have no argument for this, so set it in the configuration for the call.
        if private is not None:
            self.args.hub_private_repo = private
        try:
            make(token)
            held = self._prepare_branch(_api(token))
        except Exception as error:
            raise HubError(f"cannot publish as {repo_id!r}: {explain(error)}.") from error
        finally:
            self.args.hub_private_repo = private_repo
        if held is not None:
            raise ValueError(
                f"the repository {self.trainer.hub_model_id!r} holds {held}: choose another `hub_model_id`, or delete "
                "that repository if nobody needs it."
            )

    def _prepare_branch(self, api: HfApi) -> str | None:
        """Create the branch if it is missing. If the repository holds another kind of model, describe it."""
        repo_id, revision = str(self.trainer.hub_model_id), self._branch
        branch = revision
        try:
            files = api.list_repo_files(repo_id, revision=branch)
        except RevisionNotFoundError:
            branch = None  # a new branch starts from `main`
            files = api.list_repo_files(repo_id)
        architectures: Sequence[str] = ()
        if "config.json" in files:
            config = json.loads(Path(api.hf_hub_download(repo_id, "config.json", revision=branch)).read_text())
            architectures = config.get("architectures") or ()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        name = type(model).__name__.removeprefix("FSDP")  # FSDP2 adds this prefix to the class of the model
        held = clash(files, architectures, adapter=is_peft_model(model), architecture=name)
        if held is None and branch != revision:
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
        return held

    def name_repo(self) -> None:
        """Set the repository's name without asking the Hub, for a dry run."""
        self.trainer.hub_model_id = check_repo_id(self.args.hub_model_id, self.args.output_dir)
        self.trainer.push_in_progress = None

    # ------------------------------------------------------------------------------------------------------ the card

    def write_card(
        self,
        model_name: str | None,
        dataset_name: str | list[str] | None,
        tags: str | list[str] | None,
        *,
        method_tags: list[str],
        paper: dict[str, str],
    ) -> None:
        """
        Write the card, `README.md`, and the training curves into `output_dir`.

        Args:
            model_name (`str`, *optional*):
                Title of the card. `None` uses the name of the repository or of the output folder.
            dataset_name (`str` or `list[str]`, *optional*):
                Names of the datasets. `None` uses the names that the trainer has.
            tags (`str` or `list[str]`, *optional*):
                Further tags.
            method_tags (`list[str]`):
                Tags of the method.
            paper (`dict[str, str]`):
                arXiv `id` and BibTeX `citation` of the method.
        """
        if dataset_name is not None:
            self.trainer.dataset_names = _as_list(dataset_name)
        repo_id = self.trainer.hub_model_id or self.args.hub_model_id
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        # Drawing takes time, so the checkpoints of a run that is not published get a card without a picture.
        with_picture = self.args.push_to_hub or not self.trainer.is_in_train
        has_plots = importlib.util.find_spec("matplotlib") is not None
        history = self.trainer.state.log_history
        metrics = []
        if with_picture and has_plots:
            metrics = logged_metrics(self.trainer.method, history)
        if metrics:
            training_curves(history, Path(self.args.output_dir) / CURVE_FILE, metrics=metrics)
        card = model_card(
            TrainingFacts(
                method=self.trainer.method,
                model_name=model_name or (repo_id or Path(self.args.output_dir).absolute().name).split("/")[-1],
                trainer=type(self.trainer).__name__,
                repo_id=repo_id,
                revision=self._branch,
                base_model=get_config_model_id(model.config) or "",
                datasets=self.trainer.dataset_names,
                local_data=_is_local(self.trainer.train_dataset),
                rewards=list(zip(self.trainer.reward_func_names, self.trainer.reward_weights.tolist(), strict=True)),
                adapter=model.active_peft_config.peft_type.value if is_peft_model(model) else None,
                chat=bool(self.trainer.tokenizer.chat_template),
                paper=paper,
                tags=["generated_from_trainer", *method_tags, *_as_list(tags or [])],
                hyperparameters=shown_hyperparameters(self.args, GRPOConfig),
                history=history,
                curve=CURVE_FILE if metrics else None,
                needs_plots=with_picture and not has_plots,
            )
        )
        card.save(Path(self.args.output_dir) / "README.md")

    # ----------------------------------------------------------------------------------------------------- the pushes

    def push(
        self,
        commit_message: str | None,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        **kwargs: Any,
    ) -> Any:
        """
        Publish the content of `output_dir`. Only the main process calls it.

        Args:
            commit_message (`str`, *optional*):
                Message of the commit.
            blocking (`bool`):
                If `True`, wait for the upload.
            token (`str`, *optional*):
                Token. `None` uses the one in the configuration or of the login.
            revision (`str`, *optional*):
                Branch. `None` uses the configuration.
            private (`bool`, *optional*):
                If `True`, a new repository is private. `None` uses the configuration.
            **kwargs:
                Arguments of the trainer's `create_model_card`.

        Returns:
            [`~huggingface_hub.CommitInfo`] or a `Future` of it if not `blocking`.

        Raises:
            `HubError`: If the files could not be sent. The message has the command that sends them.
        """
        for abandoned in Path(self.args.output_dir).glob(f"{STAGE}-*"):  # from a process that was killed
            shutil.rmtree(abandoned)
        with self._to(revision):
            return self._push(commit_message, blocking, token or self.args.hub_token, private, **kwargs)

    def _push(
        self, message: str | None, blocking: bool, token: str | None, private: bool | None, **kwargs: Any
    ) -> Any:
        """Publish to the branch of [`_to`]. For arguments and result, see [`push`]."""
        refusal = None
        try:
            self.trainer.init_hf_repo(token=token, private=private)
        except (HubError, ValueError) as error:
            refusal = error  # raised below, after the files that a user can send by hand are complete
        self.trainer.create_model_card(**kwargs)
        folder, checkpoints = self._stage(STAGE)
        # A ValueError means that the repository's name or content does not allow the push. So the command in the
        # message has a placeholder for the name of another repository.
        if isinstance(refusal, ValueError):
            raise self._unsent(str(refusal), folder, private, self._branch, repo_id="OWNER/OTHER-NAME") from refusal
        if refusal is not None:
            raise self._unsent(str(refusal), folder, private, self._branch) from refusal
        if blocking:
            return self._send_or_raise(folder, checkpoints, message, token, private, self._branch)
        job = run_as_future(self._send_or_raise, folder, checkpoints, message, token, private, self._branch)
        self.trainer.push_in_progress = PushInProgress([job])  # type: ignore[arg-type]  # it takes a list
        return job

    def rehearse(self, revision: str | None, private: bool | None, **kwargs: Any) -> PushPlan:
        """
        Write the card, stage the files and print the plan of a push, without sending anything.

        Only the main process calls it.

        Args:
            revision (`str`, *optional*):
                Branch. `None` uses the configuration.
            private (`bool`, *optional*):
                If `True`, a new repository would be private. `None` uses the configuration.
            **kwargs:
                Arguments of the trainer's `create_model_card`.

        Returns:
            `PushPlan`: The plan that was printed.
        """
        if self.trainer.hub_model_id is None:
            self.name_repo()
        with self._to(revision):
            self.trainer.create_model_card(**kwargs)
            folder, _ = self._stage(STAGE)
            plan = plan_push(
                self.trainer.hub_model_id,
                folder,
                revision=self._branch,
                private=self._is_private(private),
            )
        print(visible_text(str(plan)))
        return plan

    def push_checkpoint(self, checkpoint_folder: str) -> None:
        """
        Publish a checkpoint while training continues. Only the main process calls it.

        Args:
            checkpoint_folder (`str`):
                Folder of the checkpoint.
        """
        self._checkpoints.append(Path(checkpoint_folder))
        if self.args.push_dry_run:
            return
        # As in TRL: if the last push is still running, this checkpoint is not pushed.
        busy = self.trainer.push_in_progress is not None and not self.trainer.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.trainer.callback_handler.on_push_begin(self.args, self.trainer.state, self.trainer.control)
        if self.args.save_strategy == SaveStrategy.STEPS:
            message = f"Training in progress, step {self.trainer.state.global_step}"
        else:
            message = f"Training in progress, epoch {int(self.trainer.state.epoch or 0)}"
        try:
            folder, checkpoints = self._stage(f"{STAGE}-{self.trainer.state.global_step}", Path(checkpoint_folder))
        except OSError as error:  # such as a full disk
            self._warn(message, error)
            return
        job = run_as_future(self._send_or_warn, folder, checkpoints, message, self.args.hub_token, self._branch)
        jobs = [job]
        if busy:
            jobs = [*self.trainer.push_in_progress.jobs, job]
        self.trainer.push_in_progress = PushInProgress(jobs)  # type: ignore[arg-type]  # it takes a list

    def _stage(self, name: str, checkpoint: Path | None = None) -> tuple[Path, list[str]]:
        """Stage the files to send. Return their folder, and the names of the checkpoints that need not be sent after
        this push. With `hub_strategy="checkpoint"`, only the last of these checkpoints is in the folder."""
        output = Path(self.args.output_dir)
        target = output / name
        shutil.rmtree(target, ignore_errors=True)
        state_file = STATE_FILE.format(rank="*")
        ignore, checkpoint_files = ["_*", "checkpoint-*"], list(MODEL_FILES)
        if self.args.push_method_state:
            checkpoint_files.append(state_file)
        else:
            ignore.append(state_file)
            for file in self.trainer.method_files():
                ignore += [file, f"{file}/*"]
        if checkpoint is None:
            stage(output, target, ignore=ignore)
        else:
            stage(output, target, ignore=[*ignore, *MODEL_FILES])
            stage(checkpoint, target, allow=checkpoint_files)
            if self.trainer.processing_class is not None:
                self.trainer.processing_class.save_pretrained(target)
        # Whole checkpoints always include the method's state, which resuming needs.
        waiting = [path for path in self._checkpoints if path.name not in self._sent and path.is_dir()]
        if self.args.hub_strategy == HubStrategy.CHECKPOINT and waiting:
            stage(waiting[-1], target / "last-checkpoint", ignore=["README.md"])
        if self.args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            for path in waiting:
                stage(path, target / path.name, ignore=["README.md"])
        return target, [path.name for path in waiting]

    def _send(
        self, folder: Path, checkpoints: list[str], message: str | None, token: str | None, branch: str | None
    ) -> CommitInfo:
        info = _api(token).upload_folder(
            repo_id=str(self.trainer.hub_model_id),
            folder_path=folder,
            commit_message=message,
            revision=branch,  # not the newest one, because this may run later, in another thread
        )
        self._sent.update(checkpoints)
        shutil.rmtree(folder)
        return info

    def _send_or_raise(self, folder, checkpoints, message, token, private, branch) -> CommitInfo:
        try:
            return self._send(folder, checkpoints, message, token, branch)
        except Exception as error:
            raise self._unsent(
                f"cannot publish as {self.trainer.hub_model_id!r}: {explain(error)}.", folder, private, branch
            ) from error

    def _send_or_warn(self, folder, checkpoints, message, token, branch) -> None:
        try:
            self._send(folder, checkpoints, message, token, branch)
        except Exception as error:
            shutil.rmtree(folder)
            self._warn(message, error)

    def _warn(self, message: str, error: Exception) -> None:
        logger.warning(
            "%r was not sent to %s: %s. Training goes on, and the next push sends everything again.",
            message,
            self.trainer.hub_model_id,
            explain(error),
        )

    def _unsent(
        self, reason: str, folder: Path, private: bool | None, branch: str | None, *, repo_id: str | None = None
    ) -> HubError:
        """Return an error with the reason and the command that sends the files in `folder`."""
        output_dir = self.args.output_dir
        command = upload_command(
            repo_id or self.trainer.hub_model_id or self.args.hub_model_id or Path(output_dir).absolute().name,
            folder,
            revision=branch,
            private=self._is_private(private),
        )
        return HubError(
            f"{reason} Nothing is lost: the model is in {output_dir}. Send it with `trainer.push_to_hub()`, or with "
            f"the command:\n  {command}"
        )

    def _is_private(self, private: bool | None) -> bool:
        if private is None:
            private = self.args.hub_private_repo
        return bool(private)


def _as_list(names: str | list[str]) -> list[str]:
    if isinstance(names, str):
        return [names]
    return list(names)


def _is_local(dataset: Any) -> bool:
    """Return whether data are known to be in memory or from local files."""
    if not isinstance(dataset, Dataset):
        return False
    for file in dataset.cache_files:
        if any("___" in part for part in Path(file["filename"]).parts):
            return False  # `datasets` caches data of the Hub in folders named `owner___name`
    return True


def _api(token: str | None) -> HfApi:
    return HfApi(token=token, library_name="trl-explore", library_version=__version__)
