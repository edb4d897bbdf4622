"""Train a small Llama on several processes: pipeline stages × tensor-parallel shards × copies of the data.

    torchrun --nproc-per-node 4 tutorials/train_distributed.py --pp 2 --tp 2 --rank-logs build/logs
    torchrun --nproc-per-node 2 tutorials/train_distributed.py --tp 2 --steps 5
    torchrun --nproc-per-node 2 tutorials/train_distributed.py --pp 1 2 --tp 2 1 --losses losses.json    # one by one
    torchrun --nproc-per-node 4 tutorials/train_distributed.py --tp 2 --checkpoint --steps 10 --save build/saved
    torchrun --nproc-per-node 2 tutorials/train_distributed.py --tp 2 --resume build/saved    # or on 1, or with --pp 2
    torchrun --nproc-per-node 4 tutorials/train_distributed.py --tp 2 --rules after --compile

The model begins on the meta device; each process materializes its own part, with the weights that one process would
give the whole. Rank 0 shows the progress; each rank writes its own log. Runs on CPUs (gloo) and GPUs (NCCL) alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import schedule
from schedule.api.schedule import Schedule
from schedule.distributed.checkpoint import load_sharded, save_sharded
from schedule.distributed.pipeline import Pipeline

TEXT = b"To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows. "


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", help="pipeline stages, 1 if not given; of several runs, in turn")
    parser.add_argument("--tp", type=int, nargs="+", help="tensor-parallel ranks, likewise; 1 if not given")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="of a batch, over all copies of the data")
    parser.add_argument("--steps", type=int, default=20, help="in all, those before --resume included")
    parser.add_argument("--eps", type=float, default=1e-8, help="AdamW's; a larger one magnifies rounding less")
    parser.add_argument("--checkpoint", action="store_true", help="compute the layers again in the backward pass")
    parser.add_argument("--rules", choices=["before", "after"], help="rewrite the layers, before or after fully_shard")
    parser.add_argument("--compile", action="store_true", help="compile each layer by torch.compile")
    parser.add_argument("--losses", type=Path, help="file for the loss of each step, as JSON: layout → losses")
    parser.add_argument("--rank-logs", type=Path, help="folder for one log a rank")
    parser.add_argument("--save", type=Path, help="folder for a sharded checkpoint of model and optimizer")
    parser.add_argument("--resume", type=Path, help="such a folder, saved by any number of processes")
    args = parser.parse_args()
    args.pp, args.tp = args.pp or [1] * len(args.tp or [1]), args.tp or [1] * len(args.pp or [1])
    if len(args.pp) != len(args.tp):
        parser.error(f"--pp says {len(args.pp)} layouts and --tp {len(args.tp)}")
    return args


def logger_of_this_rank(folder: Path | None) -> logging.Logger:
    """One file a rank, or nothing."""
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank{dist.get_rank()}.log", mode="w")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    return logger


def batch_of(step: int, rows: int, length: int = 16, device: str = "cpu") -> dict[str, Any]:
    """Rows of text as bytes; the same on every rank."""
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([text[start : start + length] for start in starts]).to(device)
    mask = torch.full((length, length), torch.finfo(torch.float32).min, device=device).triu(1)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask.expand(rows, 1, length, length)}


def llama(width: int, layers: int) -> LlamaForCausalLM:
    """The model, on the default device."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
            attn_implementation="eager",
        )
    )


def scheduled(args: argparse.Namespace, mesh: DeviceMesh) -> Schedule:
    """The model without data: sharded over "tp", cut into stages over "pp"."""
    stages = mesh.size(0)
    with torch.device("meta"):
        model = llama(args.width, args.layers)
    example = {name: value.to("meta") for name, value in batch_of(0, 2).items()}
    sch = schedule.create_schedule(model, batch=example, mesh=mesh)
    if mesh["tp"].size() > 1:
        sch.apply_plan(sch.shard_plan(vocabulary=False))
    if args.checkpoint:
        sch["model.layers.*"].checkpoint()
    for stage in range(1, stages):
        sch[f"model.layers.{stage * args.layers // stages - 1}"].cut_pipeline_stage()
    return sch


def built(args: argparse.Namespace, mesh: DeviceMesh, sch: Schedule) -> Any:
    """This rank's part of the model with its weights: rewritten, wrapped by FSDP2 and compiled as asked for."""
    if mesh["pp"].size() > 1:
        model: Any = schedule.build(sch, pipeline=Pipeline(args.microbatches))
        parts = list(model.stages)
    else:
        model = schedule.build(sch)
        parts = [model]
    model.train()
    if args.rules == "before":
        rewrite(sch)
    for part in parts if mesh["dp"].size() > 1 else ():
        fully_shard(part, mesh=mesh["dp"])
    if args.rules == "after":
        rewrite(sch)
    for layer in sch["model.layers.*"] if args.compile else ():
        layer.module.compile()
    return model


def rewrite(sch: Schedule) -> None:
    """Put fused operations into the layers."""
    for layer in sch["model.layers.*"]:
        layer.optimize(cost_guard=False)  # the model is too small to gain


def train(args: argparse.Namespace, mesh: DeviceMesh, logger: logging.Logger) -> list[float]:
    """The loss of each step, on the ranks that have it."""
    stages, copies, kind = mesh.size(0), mesh.size(1), mesh.device_type
    torch.manual_seed(0)
    sch = scheduled(args, mesh)
    model = built(args, mesh, sch)
    own = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%s: coordinate %s, %d parameters in its stages", mesh, mesh.get_coordinate(), own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=args.eps, foreach=False)
    first = 0
    if args.resume is not None:
        load_sharded(model, args.resume, optimizer)
        first = int(next(iter(optimizer.state.values()))["step"])
        logger.info("resumed from %s after %d steps", args.resume, first)
    losses: list[float] = []
    for step in track(range(first, args.steps), "training", disable=dist.get_rank() > 0):
        batch = batch_of(step, args.rows)
        share = {name: value.chunk(copies)[mesh.get_local_rank("dp")] for name, value in batch.items()}
        share = {name: value.to(kind) for name, value in share.items()}
        if stages > 1:
            loss = model.step(**share).loss
        else:
            loss = model(**share).loss
            loss.backward()
            loss = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d: loss %s", step, "in the last stage" if loss is None else f"{float(loss):.4f}")
        losses += [] if loss is None else [float(loss)]
    if args.save is not None:
        save_sharded(model, args.save, optimizer)
        logger.info("saved to %s", args.save)
    return losses


def main() -> None:
    """Train once for each layout."""
    args = arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    logger = logger_of_this_rank(args.rank_logs)
    curves: dict[str, list[float]] = {}
    for pp, tp in zip(args.pp, args.tp, strict=True):
        shape = (pp, dist.get_world_size() // (pp * tp), tp)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp", "tp"))
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, train(args, mesh, logger))
        curves[f"pp {pp}, tp {tp}"] = [fmean(losses) for losses in zip(*filter(None, of_ranks), strict=True)]
    if args.losses is not None and dist.get_rank() == 0:
        args.losses.write_text(json.dumps(curves), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
