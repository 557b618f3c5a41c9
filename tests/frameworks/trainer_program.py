"""An ordinary program of transformers' Trainer on the CPU: the main process is late."""

import argparse
import json
import tempfile

import late
import program
import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
parser.add_argument("--late", type=float, default=0)
parser.add_argument("--command-line", action="store_true", help="as the flags of HfArgumentParser")
args = parser.parse_args()


class Late(TrainerCallback):
    def on_train_begin(self, arguments, state, control, **_):
        if arguments.process_index == 0:
            late.work(args.late)


def settings(directory):
    options = {"output_dir": directory, "ddp_backend": args.backend}
    if args.command_line:
        flags = [f"--{name}={value}" for name, value in options.items()]
        return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(flags)[0]
    return TrainingArguments(
        **options,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )


def main():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    tokens = torch.randint(0, 32, (24, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as directory:
        model = LlamaForCausalLM(config)
        trainer = Trainer(model, settings(directory), train_dataset=data, callbacks=[Late()])
        loss = trainer.train().training_loss
    backend = torch.distributed.get_backend()
    weights = model.model.norm.weight.tolist()
    program.tell("result", json.dumps({"backend": backend, "loss": loss, "weights": weights}))
    torch.distributed.destroy_process_group()


main()
