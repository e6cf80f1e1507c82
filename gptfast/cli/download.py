"""`gptfast download`: fetch a model ahead of its first use."""

from __future__ import annotations

import click


@click.command(name="download")
@click.argument("repo_id", required=False)
@click.option("--file", "file_pattern", metavar="PATTERN", help="Fetch the one GGUF file that matches.")
def command(repo_id: str | None, file_pattern: str | None) -> None:
    """Fetch a model: REPO_ID from the Hugging Face hub, or the default model without one.

    Hub files go to the hub's own cache, which other tools share; an interrupted download resumes.
    """
    from gptfast.download import get_default_model
    from gptfast.hub import download_from_hub

    if repo_id is None:
        if file_pattern is not None:
            raise click.UsageError("--file chooses a file of a hub repository; give its REPO_ID too")
        path = get_default_model(_say)
        run = "gptfast generate"
    else:
        path = download_from_hub(repo_id, file_pattern, _say)
        run = f'gptfast generate --checkpoint "{path}"'
    _say(f"run it with: {run}")
    click.echo(path)


def _say(message: str) -> None:
    click.echo(message, err=True)
