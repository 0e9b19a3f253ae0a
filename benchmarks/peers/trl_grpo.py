"""TRL's GRPOTrainer on a job that `bench_rl.py` wrote; runs in whatever Python has TRL, knows nothing of etude.

    python trl_grpo.py job.json        # last line: {"seconds": [a step ...], "ledger": {part: seconds}, "tokens": a step, "version"}

Settings are TRL's own except where the job fixes the task: GRPO with Dr. GRPO's loss and without division by the standard deviation,
no KL, one pass over each batch, completions of one length (the end token is suppressed), float32, no gradient checkpointing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl


class Timed(trl.GRPOTrainer):
    """Notes when each step ended, and how long its parts took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger = {"generate": 0.0, "reward": 0.0, "generate, reward and log-probs": 0.0, "training step with those": 0.0}

    def _clock(self, part: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = call(*args, **kwargs)
        self.ledger[part] += time.perf_counter() - begin
        return out

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock("generate", super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock("reward", super()._calculate_rewards, *args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock("generate, reward and log-probs", super()._generate_and_score_completions, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock("training step with those", super().training_step, *args, **kwargs)


class Ends(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if len(self.times) == 1:
            self.times = [time.perf_counter()]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    if [tokenizer(text).input_ids for text in job["prompts"]] != job["prompt_ids"]:
        raise SystemExit("the prompts are other tokens here than in the job")

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % job["modulus"] == 0 for token in ids) / len(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        settings = trl.GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=len(job["prompts"]) * job["group"],
            num_generations=job["group"],
            max_completion_length=job["length"],
            generation_kwargs={"min_new_tokens": job["length"]},
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            router_aux_loss_coef=0.0,
            max_steps=job["steps"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=job["device"] == "cpu",
            model_init_kwargs={"dtype": "float32"},
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        ends = Ends()
        trainer = Timed(
            model=job["model"],
            reward_funcs=reward,
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": job["prompts"]}),
            processing_class=tokenizer,
            callbacks=[ends],
        )
        trainer.train()
    seconds = [b - a for a, b in zip(ends.times, ends.times[1:], strict=False)]
    tokens = len(job["prompts"]) * job["group"] * job["length"]
    print(json.dumps({"seconds": seconds, "ledger": trainer.ledger, "tokens": tokens, "version": trl.__version__}))


if __name__ == "__main__":
    main(sys.argv[1])
