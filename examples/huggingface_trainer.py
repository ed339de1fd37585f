"""Hugging Face Trainer: train a small language model from scratch, with RumorTrainer instead of Trainer.

torchrun --standalone --nproc-per-node 4 examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import rumor
from rumor.integrations.huggingface import RumorCallback, RumorTrainer


def counting(samples: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of numbers that count up from a random start, modulo 50."""
    starts = torch.randint(50, (samples, 1), generator=torch.Generator().manual_seed(samples))
    rows = (starts + torch.arange(16)) % 50
    return [{"input_ids": row, "labels": row} for row in rows]


with tempfile.TemporaryDirectory() as folder:
    trainer = RumorTrainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)),
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),  # without it, Accelerate counts several processes on CPUs as one
        ),
        train_dataset=counting(1024),
        eval_dataset=counting(128),
        callbacks=[RumorCallback(rumor.gossip_aga(rumor.one_peer_exponential, warmup=5))],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss of the mean model: {loss:.3f}")
torch.distributed.destroy_process_group()
