"""`mizarr completion`: prints the script by which a shell completes commands, options and workflow names."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from ...store.display.terminal import echo

VARIABLE = "_MIZARR_COMPLETE"
"""Environment variable by which the shell asks click for completions; click derives it from "mizarr"."""
INSTALL_COMMANDS = {
    "bash": "mizarr completion bash >> ~/.bashrc",
    "zsh": "mizarr completion zsh >> ~/.zshrc",
    "fish": "mizarr completion fish > ~/.config/fish/completions/mizarr.fish",
}
"""Shell -> command line that installs its completion."""


@click.command(epilog="Example: mizarr completion bash")
@click.argument("shell", type=click.Choice(list(INSTALL_COMMANDS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete mizarr commands.

    For this session: source <(mizarr completion bash). Permanently: mizarr completion bash >> ~/.bashrc;
    likewise zsh and ~/.zshrc. For fish: mizarr completion fish > ~/.config/fish/completions/mizarr.fish.
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    script = completion_class(ctx.find_root().command, {}, "mizarr", VARIABLE)
    # Not .source(), which starts the shell to ask for its version.
    echo(script.source_template % script.source_vars())


def workflow_names(ctx: click.Context, param: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Shell completions: names of workflows with this prefix, with the question that each answers.

    Arguments:
        ctx: Context of the command line so far.
        param: Parameter that is completed.
        prefix: Its beginning.
    """
    from .. import WORKFLOWS, kind_of

    return [
        CompletionItem(name, help=kind_of(name).question) for name in WORKFLOWS if name.startswith(prefix)
    ]


def setting_names(ctx: click.Context, param: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Shell completions of `--set`: "name=" of the settings with this prefix, of the workflow on the line.

    Arguments:
        ctx: Context of the command line so far.
        param: Parameter that is completed.
        prefix: Its beginning.
    """
    import dataclasses

    from .. import WORKFLOWS, kind_of

    # While the value of --set is incomplete, click leaves the argument before it in ctx.args.
    name = ctx.params.get("workflow") or next(iter(ctx.args), None)
    if name not in WORKFLOWS:
        return []
    fields = dataclasses.fields(kind_of(name).settings_type)
    return [
        CompletionItem(f"{field.name}=", help=field.metadata.get("help"))
        for field in fields
        if field.name.startswith(prefix)
    ]
