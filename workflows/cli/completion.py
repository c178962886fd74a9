"""`mizarr completion`: what makes a shell complete commands, options and names of workflows."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from ...store.display.terminal import echo

VARIABLE = "_MIZARR_COMPLETE"
WHERE = {
    "bash": "mizarr completion bash >> ~/.bashrc",
    "zsh": "mizarr completion zsh >> ~/.zshrc",
    "fish": "mizarr completion fish > ~/.config/fish/completions/mizarr.fish",
}


@click.command(epilog="Example: mizarr completion bash")
@click.argument("shell", type=click.Choice(list(WHERE)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete the words of mizarr.

    For now: source <(mizarr completion bash). For good: mizarr completion bash >> ~/.bashrc; likewise zsh and
    ~/.zshrc. For fish: mizarr completion fish > ~/.config/fish/completions/mizarr.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, "mizarr", VARIABLE)
    # Not .source(), which starts the shell to ask for its version.
    echo(made.source_template % made.source_vars())


def workflow_names(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Workflows that begin so, with what they ask."""
    from .. import WORKFLOWS, kind_of

    return [CompletionItem(name, help=kind_of(name).question) for name in WORKFLOWS if name.startswith(begun)]


def setting_names(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Settings of the workflow named before that begin so, each with its equals sign."""
    import dataclasses

    from .. import WORKFLOWS, kind_of

    # Where the option still waits for its value, what stands before it was not read as an argument.
    name = ctx.params.get("workflow") or next(iter(ctx.args), None)
    if name not in WORKFLOWS:
        return []
    fields = dataclasses.fields(kind_of(name).settings_type)
    return [
        CompletionItem(f"{field.name}=", help=field.metadata.get("help"))
        for field in fields
        if field.name.startswith(begun)
    ]
