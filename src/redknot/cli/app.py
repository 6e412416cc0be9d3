"""Entry point: commands, configuration sources and the one place where errors become exit codes."""

import logging
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.config import Env, Toml

from redknot.cli.bench import bench
from redknot.cli.console import errors
from redknot.cli.demo import demo
from redknot.cli.eval import eval_
from redknot.cli.generate import generate
from redknot.cli.inspect import inspect
from redknot.cli.profile import profile_
from redknot.errors import InputError

app = App(
    name="redknot",
    help="Reuse of document state and head-aware K/V for Hugging Face language models.",
    config=[Env("REDKNOT_"), Toml("redknot.toml", search_parents=True)],
    result_action="return_value",
    default_parameter=None,
)
app.command(demo, name="demo")
app.command(generate, name="generate")
app.command(eval_, name="eval")
app.command(profile_, name="profile")
app.command(inspect)
app.command(bench)
app.command(  # needs a web framework: imported when asked for
    "redknot.cli.serve:serve",
    name="serve",
    help="Serve a model over HTTP as OpenAI's API does.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 2 with one line on stderr for bad input.

    A command that can fail for another reason returns its own exit code.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(tokens, exit_on_error=False, print_error=False)
    except (CycloptsError, InputError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        errors.print(f"redknot: {line}", markup=False)
        return 2
    except KeyboardInterrupt:
        errors.print("redknot: interrupted")
        return 130
    return code or 0
