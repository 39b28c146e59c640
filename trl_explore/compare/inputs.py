"""Fingerprints of the data and the model of a comparison. They show that one of them has changed between two runs."""

from datasets import Dataset

from trl_explore.compare.settings import Comparison, run_arguments
from trl_explore.pretrained.smollm2 import find_pretrained
from trl_explore.runs.inputs import load_train_and_eval
from trl_explore.runs.tasks import DATA_SEED
from trl_explore.saving.fingerprints import model_fingerprint, rows_fingerprint


def input_fingerprints(comparison: Comparison) -> dict[str, str]:
    """Return the fingerprints of the training rows, the held-out rows and the model that the runs begin with, by name.
    Streamed data have no fingerprint. The tiny model of a task has none either, because the comparison builds it."""
    arguments = run_arguments(comparison, comparison.arms[0], seed=comparison.seeds[0], folder="out")
    script, _, model, mixture = arguments
    task = comparison.task
    if task is None:
        # Without a test split, the held-out rows are some of the training rows.
        train, held_out = load_train_and_eval(script, mixture, needs_eval="dataset_test_split" in comparison.subject)
    else:
        train, held_out = task.train_rows(DATA_SEED), task.held_out_rows(comparison.num_eval)
    found = {}
    if isinstance(train, Dataset):
        found["training_rows"] = rows_fingerprint(train)
    if isinstance(held_out, Dataset):
        count = min(len(held_out), comparison.num_eval)
        found["held_out_rows"] = rows_fingerprint(held_out.select(range(count)))
    if model.model_name_or_path is not None:
        name = find_pretrained(model.model_name_or_path)
        of_model = model_fingerprint(name, revision=model.model_revision)
        if of_model is not None:
            found["model"] = of_model
    return found
