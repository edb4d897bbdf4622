"""Every disturbance: statements about layers, changes of the process, copies, and none at all."""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.adversary.calls import STEP, clear, gradients
from tests.adversary.cases import Batch, Call, Disturbance, World
from tests.adversary.statements import AFTER, BOTH, statement

NOTHING = Disturbance("nothing", lambda model, world: None, ("odd", "hf"))


# -- the process ----------------------------------------------------------------------------------------------------


def _entered(name: str, manager: Callable[[], AbstractContextManager[Any]], *models: str) -> Disturbance:
    """Enter a mode for the rest of the run."""

    def apply(model: nn.Module, world: World) -> None:
        world.undo.enter_context(manager())

    return Disturbance(name, apply, models)


def _switched(name: str, get: Callable[[], Any], put: Callable[[Any], Any], value: Any, *models: str) -> Disturbance:
    """Switch something of the process, until the end of the run."""

    def apply(model: nn.Module, world: World) -> None:
        world.undo.callback(put, get())
        put(value)

    return Disturbance(name, apply, models)


def _distributed(model: nn.Module, world: World) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world.undo.callback(dist.destroy_process_group)


def _with_grad_off(model: nn.Module, batch: Batch, world: World) -> Any:
    with torch.no_grad():
        return model(**batch)


def _under(mode: Callable[[], AbstractContextManager[Any]], tolerance: float = 0.0) -> Call:
    def run(model: nn.Module, batch: Batch, world: World) -> Any:
        clear(model, batch)
        with mode():
            output = model(**batch)
        return output, gradients(model, output, batch)

    return Call("under it", run, tolerance=tolerance)


def _of_mask(name: str, call: Callable[[Any, torch.Tensor], Any], *models: str) -> Disturbance:
    def run(module: nn.Module, batch: Batch, world: World) -> Any:
        return call(module, batch["x"])

    return Disturbance(name, lambda *_: None, models, AFTER, Call(name, run))


def _of_input(name: str, change: Callable[[torch.Tensor], torch.Tensor], model: str) -> Disturbance:
    def run(module: nn.Module, batch: Batch, world: World) -> Any:
        return module(x=change(batch["x"]))

    return Disturbance(name, lambda *_: None, (model,), AFTER, Call(name, run))


def _double(model: nn.Module, world: World) -> None:
    model.double()


PROCESS: list[Disturbance] = [
    Disturbance("no_grad", lambda *_: None, ("GradEnabled",), AFTER, Call("no_grad", _with_grad_off)),
    Disturbance("inference mode", lambda *_: None, ("Inference", "GradEnabled"), AFTER, _under(torch.inference_mode)),
    Disturbance(
        "autocast", lambda *_: None, ("Autocast",), AFTER, _under(lambda: torch.autocast("cpu", torch.bfloat16), 0.05)
    ),
    Disturbance(
        "autocast off", lambda *_: None, ("Autocast",), AFTER, _under(lambda: torch.autocast("cpu", enabled=False))
    ),
    Disturbance(
        "autocast float16",
        lambda *_: None,
        ("AutocastDtype",),
        AFTER,
        _under(lambda: torch.autocast("cpu", torch.float16), 0.05),
    ),
    Disturbance("init_process_group", _distributed, ("Distributed",)),
    _entered("detect_anomaly", lambda: torch.autograd.detect_anomaly(False), "Anomaly"),
    _entered("environment variable", lambda: mock.patch.dict(os.environ, {"ADVERSARY_FLAG": "1"}), "Environ", "Getenv"),
    _entered("random.random", lambda: mock.patch.object(random, "random", lambda: 0.1), "Drawing"),
    _entered("time.time", lambda: mock.patch.object(time, "time", lambda: 0.0), "Clock"),
    _switched(
        "default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64, "DefaultDtype", "DefaultMade"
    ),
    _switched(
        "deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
        "Deterministic",
    ),
    _switched("threads", torch.get_num_threads, torch.set_num_threads, 2, "Threads"),
    _switched("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, 12345, "RecursionLimit"),
    _switched(
        "matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
        "MatmulPrecision",
    ),
    _switched(
        "mkldnn.deterministic",
        lambda: torch.backends.mkldnn.deterministic,
        lambda value: setattr(torch.backends.mkldnn, "deterministic", value),
        True,
        "Mkldnn",
    ),
    _of_input("input without gradient", lambda x: x.detach(), "RequiresGrad"),
    _of_input("strided input", lambda x: x.transpose(0, 1), "Contiguous"),
    _of_input("expanded input", lambda x: x[:1].expand(3, -1, -1), "Strides"),
    _of_input("input no leaf", lambda x: x * 1, "Leaf"),
    _of_input("input a parameter", lambda x: nn.Parameter(x.detach()), "FunctionModes"),
    _of_mask("mask None", lambda model, x: model(x, mask=None), "Masked", "Unmasked"),
    _of_mask("mask absent", lambda model, x: model(x), "Masked", "Unmasked"),
    _of_mask("mask by position", lambda model, x: model(x, torch.ones(5, 5)), "Masked", "Unmasked"),
    _of_mask("mask with rows", lambda model, x: model(x, mask=torch.ones(2, 5, 5)), "Masked", "Unmasked"),
    _of_mask("mask of one", lambda model, x: model(x, mask=torch.ones(1)), "Masked", "Unmasked"),
    _of_mask("mask a number", lambda model, x: model(x, mask=0.5), "Masked", "Unmasked"),
    _of_mask("mask boolean", lambda model, x: model(x, mask=torch.ones(5, 5).bool()), "Masked", "Unmasked"),
    _of_mask(
        "mask with gradient", lambda model, x: model(x, mask=nn.Parameter(torch.ones(5, 5))), "Masked", "Unmasked"
    ),
    _of_mask("mask the input", lambda model, x: model(x, mask=x[..., :5]), "Masked", "Unmasked"),
    _of_input("one row", lambda x: x[:1], "SizeAsked"),
    _of_input("square", lambda x: x[:, :2], "SizeAsked"),
    Disturbance("double", _double, ("HalfInput", "Layer", "Attended")),
    Disturbance("double", _double, ("Branching",), ("before",)),  # statistics of a step in float32 differ in double
]
"""What is outside of the model: each for the models that ask for it."""


# -- copies and whole models ----------------------------------------------------------------------------------------


def _pickled(model: nn.Module, world: World) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(model))
    return twin


def _pickled_disturbed(model: nn.Module, world: World) -> nn.Module:
    twin = _pickled(model, world)
    _first_linear(twin).weight.data.mul_(2)
    return twin


def _copied_disturbed(model: nn.Module, world: World) -> nn.Module:
    twin = copy.deepcopy(model)
    _first_linear(twin).weight.data.mul_(2)
    return twin


def _copied_original_disturbed(model: nn.Module, world: World) -> nn.Module:
    twin = copy.deepcopy(model)
    _first_linear(model).weight.data.mul_(2)
    return twin


def _shallow(model: nn.Module, world: World) -> nn.Module:
    return copy.copy(model)


def _first_linear(model: nn.Module) -> Any:
    return next(each for each in model.modules() if isinstance(each, nn.Linear))


def _loaded(model: nn.Module, world: World) -> None:
    model.load_state_dict(
        {name: each * 1.5 for name, each in model.state_dict().items() if each.is_floating_point()}, False
    )


def _assigned(model: nn.Module, world: World) -> None:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _in_halves(model: nn.Module, world: World) -> None:
    model.bfloat16()
    model.float()


def _bfloat16(model: nn.Module, world: World) -> None:
    model.bfloat16()


def _emptied(model: nn.Module, world: World) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()


def _frozen(model: nn.Module, world: World) -> None:
    model.requires_grad_(False)


def _checked(name: str, apply: Any, *models: str, whens: tuple[str, ...] = AFTER) -> Disturbance:
    return Disturbance(name, apply, models, whens)


def _evaluated(model: nn.Module, world: World) -> None:
    model.eval()


def _mixed(model: nn.Module, world: World) -> None:
    for index, each in enumerate(model.modules()):
        each.training = index % 2 == 0


def _hooked(model: nn.Module, world: World) -> None:
    for each in model.modules():
        each.register_forward_hook(lambda module, given, output: vars(module).setdefault("hook_calls", []).append(1))


def _renamed(model: nn.Module, world: World) -> None:
    """Every Linear is replaced by a copy of a subclass."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                twin = copy.deepcopy(child)
                twin.__class__ = type(
                    "Linear", (type(child),), {"forward": lambda self, x: super(type(self), self).forward(x) * 2}
                )
                setattr(module, name, twin)


_ALL_KINDS = ("Layer", "Attended", "Scalars", "gpt2", "llama", "bert")

WHOLE: list[Disturbance] = [
    _checked("deepcopy", lambda model, world: copy.deepcopy(model), *_ALL_KINDS, "Parent", "Containers", "Configured"),
    _checked("pickle", _pickled, "Layer", "Attended", "Scalars", "gpt2", "bert"),
    _checked("pickle, then the copy changes", _pickled_disturbed, "Layer", "Normed", "Attended"),
    _checked("deepcopy, then the copy changes", _copied_disturbed, *_ALL_KINDS, "Headed"),
    _checked("deepcopy, then the original changes", _copied_original_disturbed, "Layer", "Attended"),
    _checked("shallow copy", _shallow, "Layer", "Normed", "Attended"),
    _checked("load_state_dict", _loaded, *_ALL_KINDS, "Headed"),
    _checked("load_state_dict, assigned", _assigned, *_ALL_KINDS, "Normed", "Headed", "Optional"),
    _checked("bfloat16 and back", _in_halves, *_ALL_KINDS),
    _checked("zeroed", _emptied, "Layer", "Attended", "gpt2"),
    _checked("frozen", _frozen, *_ALL_KINDS, whens=BOTH),
    _checked("eval", _evaluated, *_ALL_KINDS, "Flags", "Normed", "Average", "Branching", whens=BOTH),
    _checked("flags mixed", _mixed, *_ALL_KINDS, "Flags", "Normed", whens=BOTH),
    _checked("hooks everywhere", _hooked, *_ALL_KINDS, "Normed", "Branching", "Parent", whens=BOTH),
    _checked("Linears of a subclass", _renamed, "Layer", "Attended", "llama", "bert", whens=BOTH),
    *(
        statement(text, ("Headed",), BOTH)
        for text in (
            "model.lm_head = nn.Linear(8, 16)",
            "model.lm_head.bias = P(torch.ones(16))",
            "model.lm_head.weight = P(model.lm_head.weight.detach().clone() * 2)",
            "model.embed.weight = P(model.embed.weight.detach() * 2)",
            "model.embed = nn.Embedding(16, 8)",
            "model.embed.padding_idx = 0",
            "model.embed.max_norm = 0.1",
            "model.layers.append(model.layers[0])",
            "model.layers.pop(0) if hasattr(model.layers, 'pop') else None",
        )
    ),
    *(
        statement(text, ("gpt2",), BOTH)
        for text in (
            "model.transformer.h[1].mlp.act = nn.ReLU()",
            "model.transformer.h[1].mlp.c_fc.bias = P(torch.ones(64))",
            "model.transformer.h[1].attn.scale_attn_weights = False",
            "model.transformer.h[1].attn.scaling = 3.0",
            "model.transformer.h[1].ln_1.eps = 0.5",
            "model.lm_head = nn.Linear(32, 64)",
            "model.lm_head.weight = P(model.lm_head.weight.detach().clone() * 2)",
            "model.transformer.h = nn.ModuleList(reversed(list(model.transformer.h)))",
            "model.transformer.h[1] = model.transformer.h[0]",
            "model.config.scale_attn_weights = False",
            "model.config.output_hidden_states = True",
            "model.config.use_cache = False",
            "model.transformer.drop.p = 0.5",
            "model.lm_head.bias = P(torch.ones(64))",
        )
    ),
    *(
        statement(text, ("llama",), BOTH)
        for text in (
            "model.model.layers[1].self_attn.q_proj.bias = P(torch.ones(32))",
            "model.model.layers[1].self_attn.scaling = 3.0",
            "model.model.layers[1].mlp.act_fn = nn.GELU()",
            "model.model.layers[1].input_layernorm.variance_epsilon = 0.5",
            "model.model.layers[1].input_layernorm = nn.LayerNorm(32)",
            "model.model.rotary_emb.attention_scaling = 2.0",
            "model.model.rotary_emb.inv_freq.mul_(2)",
            "model.lm_head = nn.Linear(32, 64)",
            "model.lm_head.bias = P(torch.ones(64))",
            "model.lm_head.weight = model.model.embed_tokens.weight",
            "model.config.output_attentions = True",
            "model.config._attn_implementation = 'sdpa'",
            "model.model.layers[1].mlp.up_proj = model.model.layers[1].mlp.gate_proj",
        )
    ),
    *(
        statement(text, (name,), BOTH)
        for name, text in (
            ("bert", "model.bert.encoder.layer[1].intermediate.intermediate_act_fn = F.relu"),
            ("bert", "model.bert.encoder.layer[1].attention.self.query.bias = None"),
            ("bert", "model.bert.encoder.layer[1].output.LayerNorm.eps = 0.5"),
            ("bert", "model.cls.predictions.decoder.bias = P(torch.ones(64))"),
            ("bert", "model.config.chunk_size_feed_forward = 2"),
            ("t5", "model.shared.weight = P(model.shared.weight.detach() * 2)"),
            ("t5", "model.encoder.block[1].layer[0].dropout.p = 0.9"),
            ("t5", "model.config.tie_word_embeddings = False"),
        )
    ),
]
"""The whole model: copies, dtypes, flags; and what is done to a part of a larger one."""

RAISING = [
    statement("self.limit = 1", ("Raising",)),
    Disturbance(
        "large inputs", lambda *_: None, ("Branching",), AFTER, Call("large", lambda m, b, w: m(b["x"] * 0 + 100.0))
    ),
    Disturbance(
        "other length", lambda *_: None, ("LazyInit", "KeptRead", "Kept"), AFTER, Call("longer", STEP.run, (2, 7))
    ),
    Disturbance("evaluation", _evaluated, ("Buffer", "Average", "Noise", "OwnGenerator", "Branching", "Counter")),
    statement("self.calls = 100", ("Counter", "CounterRead")),
    statement("self.seen = []", ("ListAppend", "TensorHook")),
    statement("self.seen.append(7)", ("ListAppend",)),
    statement("self.counter.calls = 100", ("Branching",)),
    statement("self.counter.register_forward_hook(lambda m, i, o: m.seen.append('hook'))", ("Branching",)),
    statement("module.LOG.clear()", ("GlobalAppend",)),
    statement("module.CALLS = 100", ("GlobalCount",)),
    statement("self.table['k'] = 2.0", ("ReturnsState",)),
    statement("self.register.append(3)", ("ReturnsState",)),
    statement("self.offset = torch.zeros(8)", ("ReturnsState",)),
    statement("self.generator.manual_seed(7)", ("OwnGenerator",)),
    statement("self.cache = None", ("LazyInit",)),
]
"""For models whose forwards change Python state."""
