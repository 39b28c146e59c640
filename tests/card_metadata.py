"""What the Hub checks in the metadata of a model card."""

import re

import yaml

REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def metadata_errors(content: str) -> list[str]:
    """What the Hub finds wrong with the metadata of a model card."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(match.group(1)) if match else None
    if not isinstance(data, dict):
        return ["no metadata"]
    errors = [f"{key} is empty" for key, value in data.items() if value in (None, "None", "", [])]
    for key in ("base_model", "datasets"):
        names = data.get(key, [])
        for name in names if isinstance(names, list) else [names]:
            if not REPO_ID.fullmatch(str(name)):
                errors.append(f"{key} {name!r} is no repository")
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append("tags must be strings")
    for result in [result for model in data.get("model-index", []) for result in model["results"]]:
        complete = "type" in result["task"] and {"type", "name"} <= result["dataset"].keys()
        if not complete or not all({"type", "value"} <= metric.keys() for metric in result["metrics"]):
            errors.append(f"model-index: incomplete result {result}")
    return errors
