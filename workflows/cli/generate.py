"""`mizarr generate`: continues prompts, and prints the tokens as they are generated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ...store.display.terminal import echo
from .options import LOADING, command, declares, given_options, json_option, print_json

_SETTINGS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
"""Names of the options that are fields of `GenerationSettings`."""


@command(epilog="Example: mizarr generate specimen 'Once upon a time' --max-tokens 10")
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Largest number of new tokens per prompt.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the most likely token; above 0 tokens are sampled.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Sample from the K most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Sample from the fewest tokens whose total probability is at least P.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampling."
)
@click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends the generation; repeatable.")
@click.option("--chat", is_flag=True, help="Format each prompt as a user message of the chat template.")
@declares(LOADING)
@json_option
def generate(
    model: str,
    prompts: tuple[str, ...],
    chat: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue each PROMPT with MODEL, token by token.

    Nothing is stored. `mizarr compute generate` keeps the result in a store, with the probability of each
    token; mizarr.generate in Python also takes interventions.
    """
    from ...stages.forward.generation.continuations import GenerationSettings
    from ...stages.forward.generation.generate import TokenStream
    from ...stages.forward.models.model import Model

    # Settings first: settings that contradict each other are refused before the model is loaded.
    settings = GenerationSettings(**{name: options[name] for name in _SETTINGS})
    loaded = Model.from_pretrained(model, **given_options(options, LOADING))
    inputs = [loaded.chat(prompt) for prompt in prompts] if chat else list(prompts)
    stream = TokenStream(loaded, inputs, settings=settings)
    # Tokens of several prompts arrive interleaved: only those of a single prompt are printed at once.
    is_streamed = len(prompts) == 1 and not as_json
    # With --chat the tokens are an answer, not a continuation of the prompt's line.
    if is_streamed and not chat:
        echo(prompts[0], nl=False)
    for token in stream:
        if is_streamed:
            echo(token.text, nl=False)
    results = stream.result()
    if as_json:
        print_json([asdict(result) for result in results])
    elif is_streamed:
        echo()
    else:
        for prompt, result in zip(prompts, results, strict=True):
            echo(f"{'' if chat else prompt}{result.generated_text}")
            echo()
