"""GPT-2 from scratch, through a failure: `python -m openrecycle.agent.examples.hugging_face_gpt2`."""

from functools import partial

import torch
from transformers import GPT2Config

from openrecycle import Data, Faults, Job, ResilientTrainer

config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
samples = [{"input_ids": [(start + step * k) % 64 for k in range(32)]} for start in range(64) for step in range(1, 9)]
adamw, job = partial(torch.optim.AdamW, lr=3e-3), Job.uniform(pipelines=2, stages=2, micro_batches=4)
if __name__ == "__main__":
    trainer = ResilientTrainer.from_transformers(
        config, data=Data(samples, batch_size=4), optimizer=adamw, job=job, faults=Faults(kill=["W1_1@5:F2"])
    )
    result = trainer.fit(iterations=20)
    result.save_pretrained("gpt2-trained")
    print(result.losses[0], "to", result.losses[-1], "through the loss of", *(r.worker for r in result.recoveries))
