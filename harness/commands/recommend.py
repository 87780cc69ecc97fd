"""Recommend a strategy: the fastest that fits, how sure that is, and what would confirm it.

Every strategy with its options is planned, proved and simulated: placements, inner degrees, meshes,
directions of rings and, at layer and model scope, checkpoints and offload, within the memory of a
GPU. Times that differ by less than their expected error are tied; a tie is broken by memory, in
steps of a tenth of a GPU's, then by fewer options, then by time.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from harness.base.json_fields import json_text
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.plan.tasks import Scope
from harness.recommend.answer import Recommendation, recommend
from harness.recommend.frameworks import FRAMEWORKS
from harness.recommend.question import Asked
from harness.records import defaults
from harness.terminal.answers import print_answer
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_cluster,
    add_heads,
    choice_of,
    count,
    degree,
    dtype,
    example,
    flag_of,
    heads_asked,
    length,
    listed,
    model_named,
    positive_number,
)
from harness.terminal.progress import Live, Output
from harness.training.models import Model
from harness.training.named_models import MODELS
from patterns.outside import did_you_mean

_GIB = 2**30


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "recommend",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "recommend --model llama3-8b --cluster h100-8x8 --seqlen 128k,1m",
                "recommend --heads 64/8 --cluster h100-8x8 --cp 16 --seqlen 128k",
                "recommend --model gemma3-27b --cp 8 --data documents:preset=megatron",
                "recommend --heads 32/8 --cp 8 --seqlen 1m --scope layer --memory 40",
                "recommend --model llama3-8b --cp 8 --framework megatron --json",
            ]
        ),
        formatter_class=Help,
    )
    group = parser.add_argument_group("problem (defaults in parentheses)")
    shapes = f"shapes of a model: {', '.join(MODELS)}, a config.json, or key=value pairs"
    group.add_argument("--model", type=model_named, help=shapes)
    add_heads(group)
    group.add_argument("--head-dim", type=count, help=f"width of a head ({defaults.HEAD_DIM})")
    group.add_argument(
        "--seqlen",
        type=listed(length),
        default=(defaults.SEQLEN,),
        help="tokens over all ranks, e.g. 128k,1m (128k)",
    )
    group.add_argument(
        "--pattern",
        "--data",
        help="mask, or how the data is packed, e.g. documents:preset=megatron (the model's, or "
        "causal; see `list`)",
    )
    group.add_argument("--batch", type=count, default=1, help="sequences per batch (%(default)s)")
    group.add_argument("--dtype", type=dtype, default=defaults.DTYPE, help="precision (bfloat16)")
    group.add_argument(
        "--cp", type=degree, help="context-parallel degree (all GPUs of the cluster)"
    )
    group.add_argument(
        "--scope",
        **flag_of(Scope),
        default=Scope.ATTENTION,
        help="attention alone, or a whole layer with its projections (%(default)s)",
    )
    group.add_argument("--hidden", type=count, help="model width of a layer (the model's)")
    group.add_argument(
        "--rotary", type=positive_number, help="rotary base of a layer (the model's)"
    )
    group.add_argument(
        "--direction",
        type=listed(choice_of(Direction)),
        default=tuple(Direction),
        help="whose times are summed (forward,backward)",
    )
    where = parser.add_argument_group("cluster")
    add_cluster(where)
    where.add_argument(
        "--runtime",
        **flag_of(Runtime),
        default=Runtime.GRAPH,
        help="graph: replayed from a captured graph; eager-torch: launched one by one by the host",
    )
    where.add_argument(
        "--memory", type=positive_number, help="GiB that a rank may hold (a GPU's of the cluster)"
    )
    choice = parser.add_argument_group("candidates")
    choice.add_argument(
        "--framework",
        type=_framework,
        metavar="NAME",
        help=f"only what this framework can run, with its refusals: {', '.join(FRAMEWORKS)}",
    )
    choice.add_argument(
        "--search",
        type=positive_number,
        metavar="SECONDS",
        help="also planners that search, for so long a tiling (left out: a search takes minutes "
        "on many ranks, and finds more with more time)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: an object, or a list for several lengths"
    )
    parser.set_defaults(run=run)


def _framework(text: str) -> str:
    if text not in FRAMEWORKS:
        raise argparse.ArgumentTypeError(
            f"({text}) is unknown{did_you_mean(text, FRAMEWORKS)}; choose {', '.join(FRAMEWORKS)}"
        )
    return text


def run(args: argparse.Namespace) -> int:
    """Recommend for each length; 1 if nothing runs for one of them."""
    questions = _questions(args)
    answers = [_answered(question) for question in questions]
    if args.json:
        bodies: list[object] = [answer.as_json() for answer in answers]
        body: object = bodies[0] if len(bodies) == 1 else bodies
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        console = Output(markup=False, highlight=False)
        for question, answer in zip(questions, answers, strict=True):
            print_answer(console, question, answer)
        for note in _notes(args):
            console.print(note)
    return 0 if all(answer.strategy is not None for answer in answers) else 1


def _answered(question: Asked) -> Recommendation:
    cells = len(question.candidates()) * len(question.directions) * len(question.patterns)
    with Live("recommend", cells) as live:
        return recommend(question, advance=live.advance)


def _questions(args: argparse.Namespace) -> list[Asked]:
    machine = cluster(args.cluster)
    model: Model | None = args.model
    heads_q, heads_kv = heads_asked(args, model)
    head_dim = args.head_dim or (model.head_dim if model else defaults.HEAD_DIM)
    layer = args.scope is Scope.LAYER
    if not layer and (args.hidden or args.rotary):
        raise ValueError("--hidden and --rotary require --scope layer")
    memory = machine.gpu.memory_bytes if args.memory is None else round(args.memory * _GIB)
    first = Asked(
        machine=machine,
        named=args.cluster,
        cp=args.cp or machine.gpus,
        seqlen=args.seqlen[0],
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        patterns=_patterns(args, model),
        batch=args.batch,
        dtype=args.dtype,
        directions=args.direction,
        scope=args.scope,
        hidden=args.hidden or (model.hidden if model and layer else None),
        rotary=args.rotary or (model.rotary if model and layer else None),
        runtime=args.runtime,
        memory_bytes=memory,
        search_s=args.search,
        framework=args.framework,
    )
    return [replace(first, seqlen=tokens) for tokens in args.seqlen]


def _patterns(args: argparse.Namespace, model: Model | None) -> tuple[tuple[str, int], ...]:
    """The masks, each with its layers: as asked, else the model's own."""
    if args.pattern is not None:
        return ((args.pattern, 1),)
    masks = ((defaults.PATTERN, 1),) if model is None else model.patterns
    return masks if len(masks) > 1 else ((masks[0][0], 1),)


def _notes(args: argparse.Namespace) -> Sequence[str]:
    notes = []
    if args.model is not None and args.model.note:
        notes.append(f"{args.model.name}: {args.model.note}")
    if args.search is None:
        notes.append(
            "Planners that search for their plans were left out; --search 2 adds them, in minutes."
        )
    return notes
