"""`mizarr generate`: continue prompts on the command line, printed as the tokens come."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .options import (
    adapter_option,
    backend_option,
    device_option,
    json_option,
    print_json,
    revision_option,
    trust_option,
)

if TYPE_CHECKING:
    from ...stages.forward.generation.generate import NewToken


@click.command(epilog="Example: mizarr generate specimen 'Once upon a time' --max-tokens 10")
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=50, show_default=True, help="Of each prompt."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the most likely token; above, tokens are drawn.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Draw among so many most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Draw among the fewest tokens of this total probability.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends the generation; repeatable.")
@click.option("--chat", is_flag=True, help="Put each prompt, as said by a user, into the chat template.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What the model computes in.",
)
@revision_option
@trust_option
@backend_option
@adapter_option
@device_option
@json_option
def generate(
    model: str,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stop: tuple[str, ...],
    chat: bool,
    as_json: bool,
    **source: Any,
) -> None:
    """Continue each PROMPT with MODEL, token by token.

    Nothing is stored. `mizarr compute generate` keeps the result in a store, with the probability of each
    token; mizarr.generate in Python also takes interventions.
    """
    from ...stages.forward.generation.continuations import GenerationSettings
    from ...stages.forward.generation.generate import generate as run_generation
    from ...stages.forward.models.model import Model

    how: dict[str, Any] = {
        "temperature": temperature,
        "seed": seed,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
    }
    GenerationSettings(max_tokens, **how)  # refuses settings that contradict each other before a model loads
    loaded = Model.from_pretrained(model, **source)
    given = [loaded.chat(prompt) for prompt in prompts] if chat else list(prompts)
    # With one prompt its tokens are printed as they come; those of several come in turn.
    is_streamed = len(prompts) == 1 and not as_json

    def show(token: NewToken) -> None:
        if is_streamed:
            echo(token.text, nl=False)

    if is_streamed and not chat:
        echo(prompts[0], nl=False)
    results = run_generation(loaded, given, max_tokens=max_tokens, on_token=show, **how)
    if as_json:
        print_json([asdict(result) for result in results])
    elif is_streamed:
        echo()
    else:
        for prompt, result in zip(prompts, results, strict=True):
            echo(f"{'' if chat else prompt}{result.generated_text}")
            echo()
