"""A script as it is, with its own model, data and entry point: what its Trainer would train is
tested on ours.

`audit dp-loop examples/dp_loop/script.py`
"""

import secrets

from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from with_trainer import BATCH, CLIP, EPOCHS, NOISE, Private

RECORDS = [{"input_ids": [5, 6, 7 + i], "labels": [5, 6, 7 + i]} for i in range(48)]
CLAIM = {
    "noise_multiplier": NOISE,
    "max_grad_norm": CLIP,
    "sample_rate": BATCH / len(RECORDS),
    "delta": 1e-3,
    "sampling": "shuffled",
}


def main():
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    arguments = TrainingArguments(
        "trained",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=secrets.randbits(32),
    )
    trainer = Trainer(model, arguments, train_dataset=RECORDS, callbacks=[Private()])
    # Or transformers divides each loss by the tokens of all texts of the step.
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(PrinterCallback)  # it prints the loss of the private records
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
