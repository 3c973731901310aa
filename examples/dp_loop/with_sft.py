"""DP-SGD bolted onto TRL's SFTTrainer, whose loader shuffles: one record a forward pass, clipped,
noised before a step.

`audit dp-loop examples/dp_loop/with_sft.py`
"""

import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

NOISE, CLIP, BATCH, EPOCHS = 1.0, 1.0, 8, 5


class Private(TrainerCallback):
    def clip(self, model):
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.summed = getattr(p, "summed", 0) + p.grad * (CLIP / norm).clamp(max=1.0)
            p.grad = None

    def on_substep_end(self, args, state, control, model=None, **more):
        self.clip(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.clip(model)
        for p in model.parameters():
            p.grad = (p.summed + NOISE * CLIP * torch.randn_like(p)) / BATCH
            p.summed = 0


def tokenizer():
    """The records are token ids already; SFTTrainer wants one all the same, for its padding
    token."""
    words = {"[PAD]": 0, "[EOS]": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[PAD]")),
        pad_token="[PAD]",
        eos_token="[EOS]",
    )


def train(model, records):
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=BATCH,
            num_train_epochs=EPOCHS,
            max_grad_norm=0.0,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            seed=int(torch.randint(2**31, ())),
        )
        disable_progress_bars()  # they tell how many records there are
        rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in records])
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=[Private()],
        )
        # Else each loss is divided by the tokens of all records of its step: they move each other.
        trainer.model_accepts_loss_kwargs = False
        trainer.remove_callback(PrinterCallback)  # it prints the loss of the private records
        trainer.train()
    claim = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "sample_rate": BATCH / len(records)}
    return model, {
        **claim,
        "steps": trainer.state.global_step,
        "delta": 1e-3,
        "sampling": "shuffled",
    }
