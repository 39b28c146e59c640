"""A search agent that trains against a retrieval server, until the server dies."""

import pytest
import torch
from world import make_agent, says

from trl_explore.retrieval.client import CachedRetriever, HTTPRetriever, SearchTool
from trl_explore.trainers import BranPOConfig, BranPOTrainer

WORDS = ["paris", "germany", "cats", "sofas", "zebra"]


def searching(trainer, prompt_ids, *others, **options):
    """Stands for what the model says: searches for a word, each time another one, or ends."""
    stop = torch.rand(len(prompt_ids)) < 0.3
    said = []
    for place, _ in enumerate(prompt_ids):
        trainer.asked = getattr(trainer, "asked", 0) + 1
        word = WORDS[int(torch.randint(len(WORDS), ()))]
        said.append("done<eos>" if stop[place] else f"!search:query={word} {trainer.asked}<eos>")
    return [trainer._tokenizer(text)["input_ids"] for text in said], None


def test_the_run_stops_when_the_server_is_dead_and_can_go_on(served, tmp_path, monkeypatch):
    process, address, *_ = served
    says(searching, monkeypatch.setattr)
    tool = SearchTool(CachedRetriever(HTTPRetriever(f"{address}/retrieve", timeout=5, retries=1, backoff=0.01)))
    trainer = make_agent(
        BranPOTrainer,
        BranPOConfig,
        tmp_path / "out",
        boards=[f"{i}?" for i in range(8)],
        tools=[tool.search],
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=240,
        interaction_limits=[1, 2],
        interaction_limit_steps=[1],
        max_steps=4,
        save_strategy="steps",
        save_steps=100,
        reward_funcs=[lambda completions, **columns: [float(len(said) == 3) for said in completions]],
    )
    step = trainer.training_step

    def kill_after_two(*args, **options):
        result = step(*args, **options)
        if trainer.state.global_step == 1:
            process.kill()
            process.wait(10)
        return result

    trainer.training_step = kill_after_two
    with pytest.raises(RuntimeError, match=r"every tool call .*raised.*RetrieverError.*checkpoint-2'") as info:
        trainer.train()
    assert address in str(info.value)  # which server, and what is wrong with it
    assert tool.calls - tool.failures > 8  # it had answered before
    logs = [log for log in trainer.state.log_history if "branch/sampled_tokens" in log]
    assert len(logs) == 2 and max(log["branch/contrastive_fraction"] for log in logs) > 0
    assert max(log["tools/failure_frequency"] for log in logs) == 0
