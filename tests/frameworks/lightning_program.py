"""An ordinary Lightning program, by Fabric or by Trainer: one rank is late for a barrier."""

import argparse
import json
import tempfile
import time
from datetime import timedelta

import late
import lightning
import program
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["fabric", "trainer"])
parser.add_argument("--backend")
parser.add_argument("--late", type=float, default=0)
parser.add_argument("--timeout", type=float, default=10)
parser.add_argument("--ranks", type=int, default=2)
args = parser.parse_args()
options = {"process_group_backend": args.backend, "timeout": timedelta(seconds=args.timeout)}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self):
        skip_batches(self.trainer.global_rank)

    def training_step(self, batch, index):
        del index
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def skip_batches(rank):
    program.tell("training", time.time())
    if rank == 0:
        late.work(args.late)


def run_trainer():
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=args.ranks,
            strategy=TrainerDDP(**options),
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=directory,
        )
        model = Model()
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model.layer.weight.tolist()


def run_fabric():
    fabric = Fabric(accelerator="cpu", devices=args.ranks, strategy=FabricDDP(**options))
    fabric.launch()
    skip_batches(fabric.global_rank)
    fabric.barrier()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
    assert torch.allclose(fabric.all_reduce(loss.detach(), reduce_op="mean"), loss)
    return model.weight.tolist()


try:
    with program.telling_failure():
        weights = run_trainer() if args.kind == "trainer" else run_fabric()
        program.tell("result", json.dumps({"weights": weights}))
finally:
    program.tell("finally")
