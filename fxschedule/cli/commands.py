"""All commands: their options, and the checks that need no torch, which takes seconds to import.

What a command does is in :mod:`fxschedule.cli.run_commands` and :mod:`fxschedule.cli.inspect_commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxschedule.cli import options
from fxschedule.cli.options import Asked, guarded
from fxschedule.cli.output import Code, command, refuse_unwritable


@command
def optimize(
    model: options.Name,
    rules: options.Rules = "default",
    recipe: options.RecipeIn = None,
    recipe_out: options.RecipeOut = None,
    verify: Annotated[bool, typer.Option("--verify", help=options.PROVE)] = False,
    report: options.ReportFile = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Rewrite a model wherever a rule fits, and report the results with reasons.

    Exit codes: 0 done, 1 --verify found a difference, 2 wrong options, 3 no such model here, 4 the model is refused.

    Examples: fxschedule optimize gpt2 --verify --report out.html; fxschedule optimize my_models:make_gpt --rules memory
    """
    if report is not None:
        refuse_unwritable(report, "report", (".html", ".json"))
    if recipe_out is not None:
        refuse_unwritable(recipe_out, "recipe", (".json", ".py"))
    asked = Asked(model, tiny, attention, trust_remote_code, device, batch_size, length)
    names = options.named_rules(rules)
    from fxschedule.cli import run_commands

    how = run_commands.Rewriting(names, recipe, guarded(cost_guard, tiny))
    return run_commands.optimize(asked, how, recipe_out, verify, report, as_json)


@command
def verify(
    model: options.Name,
    rules: options.Rules = "default",
    recipe: options.RecipeIn = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 2,
    length: options.Length = 32,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Rewrite a model, and prove its results unchanged.

    Outputs, gradients, random numbers and five AdamW steps are compared with the original model, in training and in
    evaluation mode, with original and with perturbed weights, at the given sizes and at others.

    Exit codes: 0 equal, 1 different, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule verify bert --tiny --rules all
    """
    asked = Asked(model, tiny, attention, trust_remote_code, device, batch_size, length)
    names = options.named_rules(rules)
    from fxschedule.cli import run_commands

    return run_commands.verify(asked, run_commands.Rewriting(names, recipe, guarded(cost_guard, tiny)), as_json)


@command
def bench(
    model: options.Name,
    rules: options.Rules = "default",
    cost_guard: options.CostGuard = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile beside it.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Training steps of each, in turns.")] = 7,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Time a training step of the original model, under torch.compile, and rewritten by fxschedule.

    Steps are timed in turns, and each time is divided by the time of the original in the same round, so that a busy
    machine slows all of them alike. The results are medians of these ratios with quartiles; below 1 is faster.

    Exit codes: 0 done, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule bench gpt2 --batch-size 4 --length 256
    """
    asked = Asked(model, tiny, attention, trust_remote_code, device, batch_size, length)
    names = options.named_rules(rules)
    from fxschedule.cli import run_commands

    return run_commands.bench(asked, names, guarded(cost_guard, tiny), compiled, rounds, as_json)


@command
def profile(
    model: options.Name,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the profile there, as JSON.")],
    rules: options.Rules = "default",
    recipe: options.RecipeIn = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Profile a training step of the rewritten model, with each rewrite named by its rule and module.

    The file opens in https://ui.perfetto.dev and in chrome://tracing.

    Exit codes: 0 done, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule profile gpt2 --tiny --out step.json
    """
    refuse_unwritable(out, "profile", (".json",))
    asked = Asked(model, tiny, attention, trust_remote_code, device, batch_size, length)
    names = options.named_rules(rules)
    from fxschedule.cli import run_commands

    return run_commands.profile(asked, run_commands.Rewriting(names, recipe, guarded(cost_guard, tiny)), out, as_json)


@command
def show(
    model: options.Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Show the graph of this module; '.' is the root.")] = "",
    depth: options.Depth = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    html: options.Html = None,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Print the modules of a model as a tree, or the traced graph of the module at PATH.

    With --html, write the modules and their graphs as a page for a browser: click a module to see its graph.

    Exit codes: 0 done, 2 no such PATH, or the page cannot be written, 3 no such model here, 4 the module cannot be
    traced; the message says at which line.

    Examples: fxschedule show gpt2 --depth 3; fxschedule show gpt2 transformer.h.0.mlp; fxschedule show gpt2 --html
    gpt2.html
    """
    if html is not None:
        refuse_unwritable(html, "page", (".html",))
    asked = Asked(model, tiny, attention, trust_remote_code)
    from fxschedule.cli import inspect_commands

    return inspect_commands.show(asked, path, depth, html, as_json)


@command
def explain(
    model: options.Name,
    path: options.ModulePath,
    rule: Annotated[str, typer.Option("--rule", help="A rule, or a family of them.", show_default=False)],
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Explain why a rule does or does not apply in a module and all below.

    If it applies, the matched part of the graph is shown. Otherwise the reason is shown, or the longest partial match
    of its pattern with the node at which it failed: the expected node and the actual one.

    Exit codes: 0 it applies, 1 it does not, 2 no such PATH or rule, 3 no such model here, 4 the model is refused.

    Example: fxschedule explain gpt2 transformer.h.0.mlp --rule bias_gelu
    """
    asked = Asked(model, tiny, attention, trust_remote_code, "cpu", batch_size, length)
    names = options.named_rules(rule)
    from fxschedule.cli import inspect_commands

    return inspect_commands.explain(asked, path, names, guarded(cost_guard, tiny), as_json)


@command
def rules(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Only this set, family or rule.")] = "",
    as_json: options.Json = False,
) -> Code:
    """List the rewrite rules with their names and replacements.

    Exit codes: 0 done, 2 no such NAME.

    Examples: fxschedule rules; fxschedule rules rms_norm
    """
    names = options.named_rules(name)
    from fxschedule.cli import inspect_commands

    return inspect_commands.rules(names, as_json)


@command
def primitives(as_json: options.Json = False) -> Code:
    """List the built-in and registered primitives of a schedule.

    Exit codes: 0 done.
    """
    from fxschedule.cli import inspect_commands

    return inspect_commands.primitives(as_json)


@command
def doctor(
    features: Annotated[bool, typer.Option("--features", help="List also the features that work here.")] = False,
    as_json: options.Json = False,
) -> Code:
    """Print versions, devices, available compilers, features that are off here, and the backend of each fused op.

    A feature is off if what it assumes of torch, CPython or transformers does not hold in the releases installed here.

    Exit codes: 0 fused ops run compiled or as Triton kernels, 1 only plain torch runs.
    """
    from fxschedule.cli import inspect_commands

    return inspect_commands.doctor(features, as_json)
