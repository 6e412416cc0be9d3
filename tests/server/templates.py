"""Small chat templates in the manner of real ones, and tokenizers to render them for."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from redknot.models.byte_tokenizer import TEMPLATE, byte_tokenizer
from redknot.models.loading import LoadOptions, _source, _tokenizer

LOOP = "{% for message in messages %}"
END = "{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
HEAD = "<|{{ message.role }}|>"
PLAIN = {
    "chatml": TEMPLATE,
    "trims": "{{ bos_token }}"
    + LOOP
    + HEAD
    + "\n\n{{ message.content | trim }}<|end|>"
    + END
    + ANSWER,
    "trims the user": LOOP + HEAD + "{% if message.role == 'user' %}{{ message.content | trim }}"
    "{% else %}{{ message.content }}{% endif %}<|end|>" + END + ANSWER,
    "json": LOOP + HEAD + "{{ message.content | tojson }}<|end|>" + END + ANSWER,
    "shouts": LOOP + HEAD + "{{ message.content | upper }}<|end|>" + END + ANSWER,
    "forgets": LOOP
    + "{% if message.role != 'assistant' %}"
    + HEAD
    + "{{ message.content }}<|end|>{% endif %}"
    + END
    + ANSWER,
    "twice": LOOP + HEAD + "{{ message.content }} {{ message.content }}<|end|>" + END + ANSWER,
    "inst": "{{ bos_token }}"
    + LOOP
    + "{% if message.role == 'user' %}[INST] {{ message.content }} "
    "[/INST]{% else %}{{ message.content }}{% endif %}" + END,
    "looks": LOOP
    + HEAD
    + "{% if message.content | length < 14 and 'redknot' in message.content %}!"
    "{% endif %}{{ message.content }}<|end|>" + END + ANSWER,
}
"Templates without tools or documents."
DOCUMENTS = (
    "{% for document in documents %}<|system|>{{ document.title }}\n{{ document.text }}<|end|>"
    "{% endfor %}" + TEMPLATE
)
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{% if not call.function.arguments is mapping %}{{ raise_exception('text') }}{% endif %}"
)
HERMES = (
    "{% if tools %}<|system|><tools>{{ tools | tojson }}</tools><|end|>{% endif %}"
    + LOOP
    + HEAD
    + "{{ message.content }}"
    + CALLS
    + '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    + END
    + "<|end|>"
    + END
    + ANSWER
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + LOOP
    + HEAD
    + "{% if message.role == 'tool' and message.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ message.content }}"
    "{% if message.tool_calls %}[TOOL_CALLS][{% endif %}"
    + CALLS
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}' + END + "{% if message.tool_calls %}]{% endif %}<|end|>" + END + ANSWER
)
LLAMA = (
    "{% if tools %}<|system|>Environment: {{ tools | tojson }}<|end|>{% endif %}"
    + LOOP
    + HEAD
    + "{{ message.content }}"
    + CALLS
    + '{"name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}' + END + "<|end|>" + END + ANSWER
)
TAGS = (
    "{% if tools %}<|system|><tools>{{ tools | tojson }}</tools><|end|>{% endif %}"
    + LOOP
    + HEAD
    + "{{ message.content }}"
    + CALLS
    + "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    + END
    + "</function>\n</tool_call>"
    + END
    + "<|end|>"
    + END
    + ANSWER
)
TOOLS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "tags": TAGS}


def bytes_with(template: str | None, *, add_bos: bool = True) -> PreTrainedTokenizerBase:
    """One token for each byte, with ``template``."""
    made = byte_tokenizer(add_bos=add_bos)
    made.chat_template = template
    return made


@cache
def embedded() -> PreTrainedTokenizerBase:
    """The embedded model's."""
    return _tokenizer(_source("embedded"), LoadOptions())


def sentencepiece(template: str) -> PreTrainedTokenizerBase:
    """Tokens that own the blank before them, so that a text's first token knows what precedes."""
    backend = Tokenizer(models.BPE(unk_token="?", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    corpus = ["Document: title text who is it the bridge was built [INST] [/INST]\n\n"] * 9
    letters = [chr(code) for code in range(32, 127)] + ["\n", "\u2581"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["?", "<|bos|>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>")
    made.chat_template = template
    return made
