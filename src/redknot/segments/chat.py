"""The model's chat template: from messages to text, and what all such texts begin with."""

import inspect
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError
from redknot.segments.placing import encode

MAX_ANCHOR_TOKENS = 4
_PLAIN = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '\n\n' if message['role'] == 'system' and message['content'] else '\n' }}{% endfor %}"
)
"For models without a template: the texts one after another, without roles."


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer begins a text with BOS by itself."""
    return tokenizer.bos_token_id in tokenizer("").input_ids


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str | None:
    """The template that a request with these tools is rendered with."""
    if tokenizer.chat_template is None:
        return None
    return str(tokenizer.get_chat_template(None, tools))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] = {},
) -> str:
    """The text of ``messages`` up to where the answer begins.

    ``variables`` are what the template may use besides them (tools, documents, a client's own).
    BOS is in it iff the template writes it, so it is to be tokenised without adding any; a model
    without a template gets the BOS that its tokenizer adds. `InputError` where the template
    refuses or fails: what a template makes of a request is the request's fault.
    """
    settings: dict[str, Any] = {"add_generation_prompt": True, **variables}
    start = ""
    if tokenizer.chat_template is None:
        settings["chat_template"] = _PLAIN
        start = str(tokenizer.bos_token) if adds_bos(tokenizer) else ""
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **settings)
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"the model's chat template refuses the request: {error}") from error
    return start + str(text)


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """`InputError` if a client's variables would change how a template is rendered."""
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
    wrong = sorted(reserved & set(variables) - {"add_generation_prompt"})
    if wrong:
        raise InputError(f"chat template variables of the server's own: {', '.join(wrong)}")


def shared_start(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that prompts with any system message begin with."""
    renderings: list[list[int]] = []
    for system in (None, "A", "Zebra"):
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": "x"})
        try:
            text = render_chat(tokenizer, messages)
        except InputError:  # some templates know no system message
            continue
        renderings.append(encode(tokenizer, text).token_ids.tolist())
    if not renderings:
        return ()
    shared = len(os.path.commonprefix(renderings))
    return tuple(renderings[0][: min(shared, MAX_ANCHOR_TOKENS)])
